"""Starts the ranks of a run, watches them, and names the one that failed.

Torch-free: the trainer is imported only inside a rank's own process.
"""
