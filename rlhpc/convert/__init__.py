"""Converts models between HuggingFace's files and Megatron's, on the CPU, a few megabytes at a time.

    sides.py: contents of each format ─> plan.py: chunks ─> execute.py: read, cast, write ─> staging.py
                                                                 └> verify.py: both sides by checksums

Copying needs numpy only: no torch, no process group, no GPU.
"""
