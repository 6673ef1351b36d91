"""Training on megatron-core."""

import rlhpc.parallel.compat  # noqa: F401  first: it hides optional packages from Megatron
from rlhpc.backends.megatron.backend import MegatronBackend
from rlhpc.backends.megatron.checkpoint import end_writers

__all__ = ["MegatronBackend", "end_writers"]
