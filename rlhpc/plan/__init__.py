"""Layer 2: decisions as values. Torch-free: a login node plans for ten thousand ranks."""
