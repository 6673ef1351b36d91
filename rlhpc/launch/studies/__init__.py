"""Comparisons of configurations over many runs."""
