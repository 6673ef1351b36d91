"""Layer 5: checkpoints on disk, whole or absent."""

from rlhpc.checkpoint.store import CheckpointStore, Saved

__all__ = ["CheckpointStore", "Saved"]
