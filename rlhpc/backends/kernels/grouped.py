"""Products of groups of rows with a matrix of each group, and gradients of these matrices. The host knows no sizes."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from rlhpc.backends.kernels.compiled import compiled, compiles

_log = logging.getLogger(__name__)
_kernel_failed = False


def grouped_product(
    rows: Float[Tensor, "N inner"], weight: Float[Tensor, "groups inner outer"], ends: Int32[Tensor, " groups"]
) -> Float[Tensor, "N outer"]:
    """Rows up to ends[0] times weight[0], and so on."""
    if not len(rows):
        return rows.new_zeros(0, weight.size(2))
    if _has_grouped_mm(rows):
        return F.grouped_mm(rows, weight, offs=ends)
    return torch.cat([part @ one for part, one in zip(_parts(rows, ends), weight, strict=True)])


def grouped_weight_gradient(
    weight: Float[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "T_or_N outer"],
    x: Float[Tensor, "T_or_N inner"],
    ends: Int32[Tensor, " groups"],
    *,
    gradient_rows: Int64[Tensor, " N"] | None = None,
    x_rows: Int64[Tensor, " N"] | None = None,
) -> Float[Tensor, "groups outer inner"]:
    """Gradient of ``weight`` in the grouped product of x with its transpose, for a backward pass to return.

    ``gradient_rows`` and ``x_rows``: which row of theirs each of the N rows is; None: they are the N rows. As
    ``weight_gradient`` (gradients.py): a float32 buffer receives it, and what is returned is without content then.
    """
    buffer = getattr(weight, "main_grad", None)
    rows = len(x if x_rows is None else x_rows)
    if buffer is None:
        if not rows:
            return torch.zeros_like(weight)
        left, right = _taken(output_gradient, gradient_rows), _taken(x, x_rows)
        return _of_groups_with_rows(_product_of_transposed(left, right, ends), ends)
    if rows:
        add_grouped_product(buffer, output_gradient, x, ends, gradient_rows, x_rows)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight, requires_grad=False)


def add_grouped_product(
    buffer: Float[Tensor, "groups outer inner"],
    output_gradient: Float[Tensor, "T_or_N outer"],
    x: Float[Tensor, "T_or_N inner"],
    ends: Int32[Tensor, " groups"],
    gradient_rows: Int64[Tensor, " N"] | None = None,
    x_rows: Int64[Tensor, " N"] | None = None,
) -> None:
    """Adds output_gradient.T @ x of each group to the buffer: on a GPU by one kernel, without copies of rows and
    without a product in memory."""
    if not _added_by_kernel(buffer, output_gradient, x, ends, gradient_rows, x_rows):
        left, right = _taken(output_gradient, gradient_rows), _taken(x, x_rows)
        _add_of_groups_with_rows(buffer, _product_of_transposed(left, right, ends), ends)


def _added_by_kernel(
    buffer: Float32[Tensor, "groups outer inner"], left: Tensor, right: Tensor, *indices: Tensor | None
) -> bool:
    """Whether the Triton kernel has added the product. Where it cannot be compiled, nothing has changed."""
    global _kernel_failed
    contiguous = buffer.is_contiguous() and left.is_contiguous() and right.is_contiguous()
    dtypes = left.dtype is right.dtype is torch.bfloat16 and buffer.dtype is torch.float32
    if _kernel_failed or not (compiles() and right.is_cuda and contiguous and dtypes):
        return False
    try:
        from rlhpc.backends.kernels.grouped_kernel import launch

        launch(buffer, left, right, *indices)
    except Exception as error:
        _kernel_failed = True
        _log.warning("gradients of experts are added without a kernel: %s", str(error).partition("\n")[0])
        return False
    return True


def _taken(matrix: Tensor, rows: Tensor | None) -> Tensor:
    return matrix if rows is None else matrix.index_select(0, rows)


def _product_of_transposed(
    left: Float[Tensor, "N outer"], right: Float[Tensor, "N inner"], ends: Int32[Tensor, " groups"]
) -> Float[Tensor, "groups outer inner"]:
    if _has_grouped_mm(right):
        return F.grouped_mm(left.t(), right, offs=ends)
    pairs = zip(_parts(left, ends), _parts(right, ends), strict=True)
    return torch.stack([one.t() @ other for one, other in pairs])


@compiled
def _of_groups_with_rows(product: Tensor, ends: Tensor) -> Tensor:
    """On Blackwell ``grouped_mm`` leaves the product of a group without rows uninitialized (pytorch#172439)."""
    rows = ends.diff(prepend=ends.new_zeros(1))
    return torch.where((rows > 0)[:, None, None], product, 0)


@compiled
def _add_of_groups_with_rows(buffer: Tensor, product: Tensor, ends: Tensor) -> None:
    rows = ends.diff(prepend=ends.new_zeros(1))
    buffer += torch.where((rows > 0)[:, None, None], product, 0)


def _has_grouped_mm(rows: Tensor) -> bool:
    """On a GPU PyTorch has the grouped product for bfloat16 only."""
    return not rows.is_cuda or rows.dtype is torch.bfloat16


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends[:-1].tolist())
