"""Layer 5: the training back ends."""
