"""The YAML's schema and how it is loaded. Torch-free."""
