"""GPU memory that PyTorch holds and does not use."""

from __future__ import annotations

import gc

import torch


def release_cached() -> None:
    """Return it to the driver, for allocators other than PyTorch's; nothing to do on a CPU.

    Tensors in reference cycles are freed first: their memory would stay in use.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
