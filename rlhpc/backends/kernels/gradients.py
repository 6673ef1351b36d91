"""Gradients of weights, added to the float32 buffers of Megatron's data parallelism in the backward pass itself."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor


def weight_gradient(
    weight: Tensor, output_gradient: Float[Tensor, "N out"], x: Float[Tensor, "N in"]
) -> Float[Tensor, "out in"]:
    """Gradient of ``weight`` in x @ weight.T, for a backward pass to return.

    A weight with a float32 buffer (``main_grad``) receives it there instead, and what is returned is without content:
    the buffer's hook ignores it (megatron/core/distributed/distributed_data_parallel.py, ``grad_added_to_main_grad``).
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return output_gradient.t() @ x
    add_product(buffer, output_gradient, x)
    return mark_added(weight)


def mark_added(weight: Tensor) -> Tensor:
    """Value that a backward pass returns for a weight whose gradient it has added to ``main_grad``."""
    weight.grad_added_to_main_grad = True
    return _content_of(weight)


def add_product(
    buffer: Float[Tensor, "out in"], output_gradient: Float[Tensor, "N out"], x: Float[Tensor, "N in"]
) -> None:
    """Adds output_gradient.T @ x to a float32 buffer."""
    if buffer.is_cuda and buffer.dtype == x.dtype:
        buffer.addmm_(output_gradient.t(), x)
    elif buffer.is_cuda and _accumulates_in_float32(x.dtype):
        torch.addmm(buffer, output_gradient.t(), x, torch.float32, out=buffer)
    else:
        _add_computed(buffer, output_gradient, x)


def _add_computed(buffer: Tensor, output_gradient: Tensor, x: Tensor) -> None:
    buffer.add_(output_gradient.t().matmul(x))  # on a CPU in float32: parallel/cpu_stand_ins.py's product


@functools.cache
def _accumulates_in_float32(dtype: torch.dtype) -> bool:
    """True if the GPU adds a half-precision product to a float32 matrix in one kernel (torch.addmm with out_dtype)."""
    x, total = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, x.t(), x, torch.float32, out=total)
    except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return bool((total == 17).all())


def _content_of(weight: Tensor) -> Tensor:
    # A weight that a table of embeddings shares gets that one's gradient too, in the same sum (zero_out_wgrad).
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
