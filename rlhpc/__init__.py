"""rlhpc: reinforcement-learning post-training of large language models as Slurm batch jobs."""

__version__ = "0.1.0"
