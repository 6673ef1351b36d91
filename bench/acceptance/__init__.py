"""Acceptance of a machine: which parts of rlhpc work on it, and how fast."""
