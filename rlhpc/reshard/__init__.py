"""Layer 5: moving weights from the training layout into the engine's."""

from rlhpc.reshard.manager import Job, ReshardManager

__all__ = ["Job", "ReshardManager"]
