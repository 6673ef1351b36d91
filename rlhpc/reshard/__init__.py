"""Layer 5: moving weights from the training layout into the engine's."""

from rlhpc.reshard.gather import push

__all__ = ["push"]
