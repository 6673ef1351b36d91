"""Everything that talks to Slurm from a login node: its commands, what they answer, and what that means in words."""
