"""Hostile programs by class, and the means to run them against canaries: ``python -m tests.rewards.hostile``."""
