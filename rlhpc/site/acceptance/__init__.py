"""Acceptance of a machine: what of rlhpc works on it, and how fast."""
