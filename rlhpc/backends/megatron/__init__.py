"""Training on megatron-core."""

from rlhpc.backends.megatron.backend import MegatronBackend

__all__ = ["MegatronBackend"]
