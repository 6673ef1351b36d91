"""GPU memory that PyTorch caches."""

from __future__ import annotations

import gc

import torch


def release_cached() -> None:
    """Returns it to the driver, for allocators other than PyTorch's. No effect on a CPU.

    Frees tensors in reference cycles first: their memory would stay in use.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
