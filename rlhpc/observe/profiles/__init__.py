"""Profiles of steps: traces, snapshots of GPU memory, ranges, stacks; and what can be read from them without torch.

A rank's files are ``profiles/step-NNNNNNNN/rank-NNNNN.*`` in the run folder. ``rank-NNNNN.json`` is written last, and
names the others.
"""
