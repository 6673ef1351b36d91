"""Layer 1: the YAML's schema and how it is loaded. Torch-free."""
