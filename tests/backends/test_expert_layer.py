"""A layer of experts on one and two ranks: outputs, gradients, repeats, and how often the host waits for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.host_reads import host_reads
from tests.helpers.parts import chunks_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import optimizer_section

pytestmark = pytest.mark.ranks

TOKENS = 24
CASES = {
    "one rank": Case("qwen3moe"),
    "ep": Case("qwen3moe", ep=2),
    "etp": Case("qwen3moe", etp=2),
    "ep, allgather": Case("qwen3moe", ep=2, expert_dispatch="allgather"),
    "etp, allgather": Case("qwen3moe", etp=2, expert_dispatch="allgather"),
}


@dataclass(frozen=True)
class Pass:
    """Of one rank's tokens: output, gradients of the input and of the weights, and reads by the host."""

    tensors: dict[str, np.ndarray]
    waits: tuple[tuple[str, ...], tuple[str, ...]]  # forward, backward
    repeated: bool  # a second pass is bit-equal


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Pass, ...]]:
    """By case, of both ranks."""
    folder = make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3moe")
    ranks = run_ranks(_passes, 2, folder)
    return {name: tuple(rank[name] for rank in ranks) for name in CASES}


@pytest.mark.parametrize("name", [name for name in CASES if name != "one rank"])
def test_outputs_and_gradients_are_those_of_experts_on_one_rank(found: dict[str, tuple[Pass, ...]], name: str) -> None:
    for own, wanted in zip(found[name], found["one rank"], strict=True):
        for what in ("output", "input"):
            assert _distance(own.tensors[what], wanted.tensors[what]) < 1e-5, what
    own, wanted = (_gradients(found[case], CASES[case]) for case in (name, "one rank"))
    for what in ("router", "w13", "w2"):
        assert np.abs(wanted[what]).max() > 0
        assert _distance(own[what], wanted[what]) < 1e-5, what


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_pass_is_bit_equal(found: dict[str, tuple[Pass, ...]], name: str) -> None:
    assert all(one.repeated for one in found[name])


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_for_experts_on_several_ranks_and_else_never(
    found: dict[str, tuple[Pass, ...]], name: str
) -> None:
    for one in found[name]:
        forward, backward = one.waits
        assert len(forward) == (name != "one rank"), forward
        assert not backward


def _distance(own: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(own - wanted).max() / np.abs(wanted).max())


def _gradients(passes: tuple[Pass, ...], case: Case) -> dict[str, np.ndarray]:
    """Of the whole weights and of all tokens."""
    first, second = (one.tensors for one in passes)
    joined = {"router": first["router"] + second["router"]}
    for what in ("w13", "w2"):
        if case.ep > 1:
            joined[what] = np.concatenate([first[what], second[what]])
        elif case.etp > 1 and what == "w13":
            halves = [np.split(one[what], 2, axis=1) for one in (first, second)]
            joined[what] = np.concatenate([half[part] for part in (0, 1) for half in halves], axis=1)
        elif case.etp > 1:
            joined[what] = np.concatenate([first[what], second[what]], axis=2)
        else:
            joined[what] = first[what] + second[what]
    return joined


def _passes(folder: Path) -> dict[str, Pass]:
    return {name: _pass(folder, case) for name, case in CASES.items()}


def _pass(folder: Path, case: Case) -> Pass:
    import torch
    import torch.distributed as dist

    from rlhpc.backends.megatron.expert_layer import ExpertLayer
    from rlhpc.parallel.compat import megatron_device

    backend = actor(folder, case, optimizer_section())
    layer = next(module for model in backend.models for module in model.modules() if isinstance(module, ExpertLayer))
    (chunk,) = chunks_of(backend)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randn(TOKENS, 1, layer.config.hidden_size, generator=generator)
    own = torch.zeros(TOKENS, 1, dtype=torch.int16)
    gradient = torch.randn(given.shape, generator=generator)
    results = []
    for _ in range(2):
        x = given.clone().requires_grad_()
        with megatron_device(), chunk.no_sync():
            for weight in layer.parameters():
                weight.main_grad.zero_()
                weight.grad_added_to_main_grad = False
            with host_reads() as forward:
                output, _ = layer(x, padding_mask=own)
            with host_reads() as backward:
                torch.autograd.backward((output,), grad_tensors=(gradient,))
        weights = {"router": layer.router.weight, "w13": layer.experts.w13, "w2": layer.experts.w2}
        tensors = {name: weight.main_grad.clone().numpy() for name, weight in weights.items()}
        results.append({"output": output.detach().numpy(), "input": x.grad.numpy(), **tensors})
    same = all((results[0][name] == results[1][name]).all() for name in results[0])
    return Pass(results[0], (tuple(forward), tuple(backward)), same)
