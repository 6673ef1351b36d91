"""Warnings of other packages that are expected in every run and need nobody's attention.

Each is named with its category, module, message and the reason why it is harmless; all others are shown. With
PYTHONWARNINGS or ``python -W``, which ask for warnings, none is hidden.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownWarning:
    """``module`` and ``message``: regular expressions for the module that issues it and for the beginning of its
    text."""

    category: type[Warning]
    module: str
    message: str
    reason: str


KNOWN = (
    KnownWarning(
        UserWarning,
        r"megatron\.core\..*",
        r"(Transformer Engine and Apex are|Apex is) not installed\. Falling back to",
        "both are hidden from Megatron, also where they are installed (parallel/compat.py)",
    ),
    KnownWarning(
        UserWarning,
        r"megatron\.core\.optimizer\.optimizer$",
        r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
        "Megatron looks for gradients to reset on the shards of its parameters, which have none",
    ),
    KnownWarning(
        UserWarning,
        r"megatron\.core\.tensor_parallel\.layers$",
        r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONN",
        "ranks with GPUs have it (launch/machine.py), on a CPU it has no effect",
    ),
    KnownWarning(
        FutureWarning,
        r"vllm\.triton_utils\.dispatcher$",
        r"`torch\.distributed\.reduce_op` is deprecated",
        "vLLM looks at every name of the modules that it searches for kernels",
    ),
    KnownWarning(
        FutureWarning,
        r"torch\.distributed\.c10d_logger$",
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        "PyTorch before 2.13 has only these names of the collectives; Megatron calls them too",
    ),
)

# Logger, beginning of its message, reason.
KNOWN_LOGS = (
    (
        "vllm.triton_utils.importing",
        "Triton is installed, but doesn't include CPU backend",
        "PyTorch brings Triton, and vLLM's CPU build does not use it",
    ),
    (
        "torchao",
        "Failed to load ",
        "transformers imports it where it is installed; its own kernels are for GPUs, and moments need none of them",
    ),
    (
        "torch.utils._pytree",
        "<enum ",
        "torchao registers its enumerations in a way that PyTorch 2.13 no longer needs",
    ),
)


def hide_known_warnings() -> None:
    """Hides the known warnings in this process and in those that it forks. Call it before the packages are imported."""
    if sys.warnoptions:
        return
    for known in KNOWN:
        warnings.filterwarnings("ignore", known.message, known.category, known.module)
    for name, beginning, _ in KNOWN_LOGS:
        logging.getLogger(name).addFilter(_Hides(beginning))


class _Hides(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


@contextlib.contextmanager
def without_native_lines(pattern: str) -> Iterator[None]:
    """Context in which native code prints to stderr; lines that contain the pattern are dropped, all others are
    printed at the end. For calls of milliseconds: what a crash within it has printed is lost."""
    if sys.warnoptions:
        yield
        return
    sys.stderr.flush()
    original, held = os.dup(2), os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        with open(held, "rb") as file:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
        kept = [line for line in lines if not re.search(pattern.encode(), line)]
        with contextlib.suppress(OSError), open(original, "wb") as file:
            file.write(b"".join(kept))
