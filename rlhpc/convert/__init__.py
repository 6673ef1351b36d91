"""Converts models between HuggingFace's files and Megatron's, on the CPU, a few megabytes at a time.

    sides.py: contents of each format ─> plan.py: files ─> execute.py: read, cast, write ─> target.py: NAME.partial
                                                                └> verify.py: both sides, bit by bit

Plans, reading and HuggingFace's files need numpy only; torch_dist_files.py writes Megatron's with torch.save.
"""
