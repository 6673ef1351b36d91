"""Which rank holds which part of which tensor, in training and in the engine. Torch-free."""
