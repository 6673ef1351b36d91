"""Brings rlhpc and the wheels that it needs to a machine without network. Torch-free."""
