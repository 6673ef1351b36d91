"""Training on megatron-core."""

from rlhpc.backends.megatron.backend import MegatronBackend
from rlhpc.backends.megatron.checkpoint import end_writers

__all__ = ["MegatronBackend", "end_writers"]
