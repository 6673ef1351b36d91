"""The Triton kernel of gradients of experts' weights, in Triton's interpreter, which has no bfloat16 products."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.heavy

ENDS = (3, 3, 90, 150)  # the second group has no rows


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 1e-4)])
def test_products_of_groups_are_added_and_groups_without_rows_are_left(dtype: torch.dtype, near: float) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from rlhpc.backends.kernels import grouped_kernel

    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(ENDS[-1], size, generator=generator).to(dtype) for size in (40, 136))
    buffer = torch.randn(len(ENDS), 136, 40, generator=generator)
    expected, begin = buffer.clone(), 0
    for group, end in enumerate(ENDS):
        expected[group] += gradient[begin:end].float().T @ x[begin:end].float()
        begin = end
    again, untouched = buffer.clone(), buffer[1].clone()
    kernel = interpreter.InterpretedFunction(grouped_kernel.add_products.fn)
    for one in (buffer, again):
        grouped_kernel.launch(one, gradient, x, torch.tensor(ENDS, dtype=torch.int32), kernel)
    torch.testing.assert_close(buffer, expected, atol=near, rtol=near)
    assert torch.equal(buffer, again)
    assert torch.equal(buffer[1], untouched)
