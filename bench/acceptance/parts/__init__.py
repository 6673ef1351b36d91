"""Parts of acceptance, each run in its own process."""
