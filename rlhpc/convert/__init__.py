"""Layer 6: models from HuggingFace's files into Megatron's and back, on the CPU, a few megabytes at a time.

The copying needs numpy only: no torch, no process group, no GPU.
"""
