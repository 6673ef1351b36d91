"""Models from HuggingFace's files into Megatron's and back, on the CPU, a few megabytes at a time.

    sides.py: what each format holds ─> plan.py: chunks ─> execute.py: read, cast, write ─> staging.py
                                                                └> verify.py: both sides by checksums

The copying needs numpy only: no torch, no process group, no GPU.
"""
