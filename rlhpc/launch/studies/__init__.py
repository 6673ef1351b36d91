"""Studies: searches and comparisons of configurations over many runs."""
