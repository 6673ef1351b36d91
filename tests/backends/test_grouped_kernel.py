"""The Triton kernel of gradients of experts' weights: its numbers in Triton's interpreter, its code for real GPUs."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rlhpc.backends.kernels import grouped
from tests.helpers.fake_cuda import FakeCuda

pytest.importorskip("triton")
pytestmark = pytest.mark.heavy

ENDS = (3, 3, 90, 150)  # the second group has no rows
OUTER, INNER = 136, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products in bfloat16
def test_products_of_groups_are_added_and_groups_without_rows_are_left(dtype: torch.dtype) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from rlhpc.backends.kernels import grouped_kernel

    gradient, x, buffer, expected = _inputs(dtype)
    again, untouched = buffer.clone(), buffer[1].clone()
    kernel = InterpretedFunction(grouped_kernel.add_products.fn)
    for one in (buffer, again):
        grouped_kernel.launch(one, gradient, x, torch.tensor(ENDS, dtype=torch.int32), kernel)
    torch.testing.assert_close(buffer, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(buffer, again)
    assert torch.equal(buffer[1], untouched)


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05")])
def test_the_kernel_compiles_to_a_gpu_s_matrix_instructions(capability: int, instruction: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlhpc.backends.kernels import grouped_kernel

    pointers = {"buffer": "*fp32", "output_gradient": "*bf16", "x": "*bf16", "ends": "*i32"}
    signature = {**pointers, "outer": "i32", "inner": "i32", "TILE": "constexpr", "ROWS": "constexpr"}
    sizes = {"TILE": grouped_kernel._TILE, "ROWS": grouped_kernel._ROWS}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(6)}
    source = ASTSource(fn=grouped_kernel.add_products, signature=signature, constexprs=sizes, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=grouped_kernel.OPTIONS)
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared < 160 << 10  # an A100's


def test_a_gpu_s_gradients_are_added_by_the_kernel_and_without_it_if_it_fails(caplog: Any) -> None:
    from rlhpc.backends.kernels import grouped_kernel

    gradient, x, buffer, expected = _inputs(torch.bfloat16)
    calls = []

    def fail(*operands: Tensor) -> None:
        calls.append(operands)
        raise RuntimeError("no driver")

    with FakeCuda(), mock.patch.object(grouped, "_kernel_failed", False), mock.patch.object(grouped, "compiles") as on:
        weight = torch.nn.Parameter(torch.empty(buffer.shape, dtype=torch.bfloat16).cuda())
        operands = gradient.cuda(), x.cuda(), torch.tensor(ENDS, dtype=torch.int32).cuda()
        on.return_value = True
        weight.main_grad = buffer.cuda()
        with mock.patch.object(grouped_kernel, "launch", lambda *given: calls.append(given)):
            grouped.grouped_weight_gradient(weight, *operands)
        assert [tensor.shape for tensor in calls.pop()] == [buffer.shape, gradient.shape, x.shape, (len(ENDS),)]
        assert torch.equal(weight.main_grad.cpu(), buffer)
        assert weight.grad_added_to_main_grad
        with mock.patch.object(grouped_kernel, "launch", fail), caplog.at_level(logging.WARNING):
            for _ in range(2):
                weight.main_grad = buffer.cuda()
                grouped.grouped_weight_gradient(weight, *operands)
                torch.testing.assert_close(weight.main_grad.cpu(), expected, atol=0.2, rtol=0.01)
    assert len(calls) == 1
    assert "no driver" in caplog.text


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output gradient, x, buffer, what is in the buffer afterwards)"""
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.randn(ENDS[-1], size, generator=generator).to(dtype) for size in (OUTER, INNER))
    buffer = torch.randn(len(ENDS), OUTER, INNER, generator=generator)
    expected, begin = buffer.clone(), 0
    for group, end in enumerate(ENDS):
        expected[group] += gradient[begin:end].float().T @ x[begin:end].float()
        begin = end
    return gradient, x, buffer, expected
