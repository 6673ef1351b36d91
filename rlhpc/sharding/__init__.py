"""Placement of each tensor on the ranks, in training and in the engine. Torch-free."""
