"""Checks of a config before anything starts: each names the key, the value and the remedy. Torch-free."""
