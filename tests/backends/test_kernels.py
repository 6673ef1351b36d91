"""Functions of a dense layer between its products: each against its plain form, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhpc.backends.kernels import compiled as compiled_module
from rlhpc.backends.kernels.compiled import choose_compilation, compiled
from rlhpc.backends.kernels.rms_norm import rms_norm
from rlhpc.backends.kernels.rotary import rotate, split_normed_rotated, split_rotated
from rlhpc.backends.kernels.swiglu import swiglu_linear

TOKENS, GROUPS, QUERIES, DIM, EPS = 7, 3, 2, 8, 1e-5
Function = Callable[..., tuple[Tensor, ...]]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def plain_heads(fused: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
    query, key, value = fused[:, :, :QUERIES].flatten(1, 2), fused[:, :, QUERIES], fused[:, :, -1]
    if norms:
        query, key = plain_norm(query, norms[0]), plain_norm(key, norms[1])
    return plain_rotation(query, *angles()), plain_rotation(key, *angles()), value


def plain_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up) @ weight.T


def angles() -> tuple[Tensor, Tensor]:
    """Scaled, as by YaRN."""
    turns = torch.arange(TOKENS)[:, None] * torch.linspace(0.1, 1, DIM // 2)
    both = torch.cat([turns, turns], dim=-1)
    return both.cos() * 1.2, both.sin() * 1.2


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


FUSED = (TOKENS, GROUPS, QUERIES + 2, DIM)
CASES: dict[str, tuple[Function, Function, tuple[Tensor, ...]]] = {
    "norm": (
        lambda x, weight: (rms_norm(x, weight, EPS),),
        lambda x, weight: (plain_norm(x, weight),),
        (random(TOKENS, 2, DIM), random(DIM)),
    ),
    "rotation": (
        lambda x: (rotate(x, *angles()),),
        lambda x: (plain_rotation(x, *angles()),),
        (random(TOKENS, GROUPS, DIM),),
    ),
    "heads": (lambda x: split_rotated(x, *angles()), plain_heads, (random(*FUSED),)),
    "one group": (lambda x: split_rotated(x, *angles()), plain_heads, (random(TOKENS, 1, QUERIES + 2, DIM),)),
    "normed heads": (
        lambda x, *weights: split_normed_rotated(x, *angles(), *weights, EPS),
        plain_heads,
        (random(*FUSED), random(DIM), random(DIM) + 1),
    ),
    "SwiGLU": (
        lambda x, weight: (swiglu_linear(x, weight),),
        lambda x, weight: (plain_swiglu(x, weight),),
        (random(TOKENS, 1, 2 * DIM), random(5, DIM)),
    ),
}


def outcome(function: Function, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs, and gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in given]
    outputs = function(*leaves)
    gradients = [random(*output.shape).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_plain_forms(name: str) -> None:
    ours, plain, given = CASES[name]
    expected = outcome(plain, tuple(x.double() for x in given))
    for mine, exact in zip(outcome(ours, given), expected, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_half_precision_comes_back_in_half_precision(name: str) -> None:
    ours, plain, given = CASES[name]
    given = tuple(x.bfloat16() for x in given)
    expected = outcome(plain, tuple(x.double() for x in given))
    for mine, exact in zip(outcome(ours, given), expected, strict=True):
        assert mine.dtype is torch.bfloat16
        torch.testing.assert_close(mine.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["norm", "rotation", "heads"])
def test_half_precision_is_rounded_once(name: str) -> None:
    ours, _, given = CASES[name]
    halves = tuple(x.bfloat16() for x in given)
    for mine, wide in zip(ours(*halves), ours(*(x.float() for x in halves)), strict=True):
        assert torch.equal(mine, wide.bfloat16())


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("norm", 2 * TOKENS * DIM + DIM + 2 * TOKENS),
        ("rotation", 2 * TOKENS * DIM),
        ("heads", 2 * TOKENS * DIM),
        ("SwiGLU", TOKENS * 2 * DIM + 5 * DIM),
    ],
)
def test_only_inputs_are_kept(name: str, kept: int) -> None:
    """Elements that autograd saves: angles, which all layers share, weights, inputs, a number for each normed row."""
    ours, _, given = CASES[name]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(*(x.clone().requires_grad_() for x in given))
    assert sum(x.numel() for x in saved) == kept


@pytest.fixture
def compiling() -> Iterator[None]:
    choose_compilation("functions")
    yield
    choose_compilation("none")


@pytest.mark.long
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_give_the_same(name: str) -> None:
    """By torch's inductor, in C++."""
    ours, plain, given = CASES[name]
    torch._dynamo.utils.counters.clear()
    found, expected = outcome(ours, given), outcome(plain, tuple(x.double() for x in given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one forward and one backward"
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("compiling")
def test_another_number_of_rows_is_not_compiled_again() -> None:
    ours, plain, (x, weight) = CASES["SwiGLU"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for rows in (7, 5, 3):
        for mine, exact in zip(outcome(ours, (x[:rows], weight)), outcome(plain, (x[:rows], weight)), strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("compiling")
def test_an_error_of_a_compiled_function_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed its inputs: it does not run again, and stays compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    runs: list[int] = []

    def lack(x: Tensor) -> Tensor:
        runs.append(len(runs))
        raise torch.OutOfMemoryError("CUDA out of memory")

    lacking = compiled(lack)
    with pytest.raises(torch.OutOfMemoryError):
        lacking(torch.ones(1))
    assert (runs, lacking.compiles) == ([0], True)


@pytest.mark.usefixtures("compiling")
def test_what_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def compile_fails(function: Any, **_: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("no compiler\nbecause")

        return fail

    monkeypatch.setattr(torch, "compile", compile_fails)
    doubled = compiled(lambda x: 2 * x)
    assert [float(doubled(torch.tensor(value))) for value in (1.0, 2.0)] == [2.0, 4.0]
    (record,) = (record for record in caplog.records if record.name == compiled_module.__name__)
    assert record.getMessage().endswith("runs uncompiled: no compiler")
