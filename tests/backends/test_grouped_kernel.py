"""The Triton kernel of gradients of experts' weights: its numbers in Triton's interpreter, its code for real GPUs."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlhpc.backends.kernels import expert_mlp, grouped_kernel
from tests.helpers.fake_cuda import FakeCuda

pytest.importorskip("triton")
pytestmark = pytest.mark.heavy

ENDS = (3, 3, 90, 150)  # the second group has no rows
OUTER, INNER = 136, 40
TOKENS = 37
TAKEN = (None, "gradient", "x")  # whose rows are named by their numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products in bfloat16
@pytest.mark.parametrize("taken", TAKEN)
def test_products_of_groups_are_added_and_groups_without_rows_are_left(taken: str | None, dtype: torch.dtype) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    gradient, x, rows, buffer, expected = _inputs(dtype, taken)
    again, untouched = buffer.clone(), buffer[1].clone()
    interpreted = InterpretedFunction(grouped_kernel.add_products.fn)
    with mock.patch.object(grouped_kernel, "add_products", interpreted):
        for one in (buffer, again):
            grouped_kernel.launch(one, gradient, x, torch.tensor(ENDS, dtype=torch.int32), **rows)
    torch.testing.assert_close(buffer, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(buffer, again)
    assert torch.equal(buffer[1], untouched)


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma"), (100, "tcgen05")])
def test_the_kernel_compiles_to_a_gpu_s_matrix_instructions(
    capability: int, instruction: str, taken: str | None
) -> None:
    pointers = {"buffer": "*fp32", "output_gradient": "*bf16", "x": "*bf16", "ends": "*i32"}
    rows = {f"{one}_rows": "*i64" if one == taken else "constexpr" for one in TAKEN if one}
    signature = {**pointers, **rows, "outer": "i32", "inner": "i32", "TILE": "constexpr", "ROWS": "constexpr"}
    constants: dict[str, Any] = {"TILE": grouped_kernel._TILE, "ROWS": grouped_kernel._ROWS}
    constants.update({name: None for name, type_ in rows.items() if type_ == "constexpr"})
    given = [place for place, name in enumerate(signature) if name not in constants]
    aligned = {(place,): [["tt.divisibility", 16]] for place in given}
    source = ASTSource(fn=grouped_kernel.add_products, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=grouped_kernel.OPTIONS)
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared < 160 << 10  # an A100's


def test_a_gpu_s_gradients_are_added_by_the_kernel_and_without_it_if_it_fails(caplog: Any) -> None:
    gradient, x, rows, buffer, expected = _inputs(torch.bfloat16, "x")
    calls = []

    def fail(*operands: Tensor) -> None:
        calls.append(operands)
        raise RuntimeError("no driver")

    with (
        FakeCuda(),
        mock.patch.object(expert_mlp, "_kernel_failed", False),
        mock.patch.object(expert_mlp, "compiles") as on,
    ):
        weight = torch.nn.Parameter(torch.empty(buffer.shape, dtype=torch.bfloat16).cuda())
        operands = gradient.cuda(), x.cuda(), torch.tensor(ENDS, dtype=torch.int32).cuda()
        taken = {name: one.cuda() for name, one in rows.items()}
        on.return_value = True
        weight.main_grad = buffer.cuda()
        with mock.patch.object(grouped_kernel, "launch", lambda *given: calls.append(given)):
            expert_mlp.grouped_weight_gradient(weight, *operands, **taken)
        shapes = [None if one is None else tuple(one.shape) for one in calls.pop()]
        assert shapes == [buffer.shape, gradient.shape, (TOKENS, INNER), (len(ENDS),), None, (ENDS[-1],)]
        assert torch.equal(weight.main_grad.cpu(), buffer)
        assert weight.grad_added_to_main_grad
        with mock.patch.object(grouped_kernel, "launch", fail), caplog.at_level(logging.WARNING):
            for _ in range(2):
                weight.main_grad = buffer.cuda()
                expert_mlp.grouped_weight_gradient(weight, *operands, **taken)
                torch.testing.assert_close(weight.main_grad.cpu(), expected, atol=0.2, rtol=0.01)
    assert len(calls) == 1
    assert "no driver" in caplog.text


def _inputs(dtype: torch.dtype, taken: str | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor, Tensor]:
    """(output gradient, x, numbers of the rows of one of them, buffer, what is in the buffer afterwards)"""
    generator = torch.Generator().manual_seed(0)
    lengths = {name: TOKENS if name == taken else ENDS[-1] for name in ("gradient", "x")}
    gradient = torch.randn(lengths["gradient"], OUTER, generator=generator).to(dtype)
    x = torch.randn(lengths["x"], INNER, generator=generator).to(dtype)
    rows = {f"{taken}_rows": torch.randint(TOKENS, (ENDS[-1],), generator=generator)} if taken else {}
    left, right = gradient[rows.get("gradient_rows", slice(None))], x[rows.get("x_rows", slice(None))]
    buffer = torch.randn(len(ENDS), OUTER, INNER, generator=generator)
    expected, begin = buffer.clone(), 0
    for group, end in enumerate(ENDS):
        expected[group] += left[begin:end].float().T @ right[begin:end].float()
        begin = end
    return gradient, x, rows, buffer, expected
