"""Starting the ranks of a run, watching them, naming the one that failed. Torch-free: the trainer is reached only
inside a rank's own process."""
