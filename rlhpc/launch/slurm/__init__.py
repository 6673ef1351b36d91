"""Slurm as a login node sees it: its commands, their answers, and the meaning of these in words."""
