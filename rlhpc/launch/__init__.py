"""Layer 7: starting the ranks of a run, watching them, naming the one that failed. Torch-free; the trainer is reached
only inside the rank's own process."""
