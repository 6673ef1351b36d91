"""Memory that a GPU's libraries keep, beside what tests measure."""

from __future__ import annotations

# cuBLAS on Hopper keeps one for the thread of the forward pass and one for that of the backward pass
# (aten/src/ATen/cuda/CublasHandlePool.cpp); on other GPUs they are smaller.
CUBLAS_WORKSPACES = 2 * (32 << 20)
