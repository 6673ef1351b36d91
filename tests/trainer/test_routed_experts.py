"""Where the routed experts of samples are: on one rank each until a step learns from them, then where that is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlhpc.api import Prompt, Sample
from rlhpc.data.groups import Group
from rlhpc.models import read_model
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.trainer.batches import Batching, forward_plans, update_plans
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.roles import EngineRank, Role
from rlhpc.trainer.routed_experts import moved_routed_experts, trained_routed_experts
from tests.data.test_groups import make_group, make_sample
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

LAYERS, TOP_K, COUNT = 4, 2, 12


def routed_experts_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 8, (30 + number, LAYERS, TOP_K)).astype(np.uint8)


def equal(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


@dataclass
class Cut:
    """As much of a back end as says which rank trains on what: two data-parallel ranks of two pipeline stages."""

    shape: Any
    layout: Any
    meets_in_microbatches: bool = False


def make_actor(model: Path, rank: int) -> Any:
    backend: Any = Cut(read_model(model), ParallelLayout(world_size=4, pp=2))
    return Role(backend, rank, tokens_per_microbatch=64, tokens_without_gradient=128, router_replay=True)


def moves(model: Path, folder: Path) -> tuple[list[bool], list[Any], list[Any]]:
    """For each sample of a step whether this rank is to have its routed experts; what it has; and that of groups on
    four engines."""
    rank = dist.get_rank()
    role, batching = make_actor(model, rank), Batching(2, "token-mean", 1024, True, epochs=3, shuffle_seed=0)
    samples = [
        with_tokens(number, routed_experts_of(number) if number % 4 == rank else None) for number in range(COUNT)
    ]
    epochs = update_plans(role, batching, samples, step=4)
    assert len(set(epochs)) == 3
    plans = (*(plan for epoch in epochs for plan in epoch), *forward_plans(role, batching, samples))
    own = {i for plan in plans for ids in role.own_bins(plan) for i in ids}
    found = trained_routed_experts(role, batching, samples, step=4)
    groups = [with_routed_experts(number, rank) for number in range(6)]
    resumed = moved_routed_experts(EngineRank(rank, world_size=4, tp=1), groups)
    Carryover(ready=groups[:2], unfinished=groups[2:]).save(folder, rank)
    return (
        [i in own for i in range(COUNT)],
        [s.routed_experts for s in found],
        [[s.routed_experts for s in g.samples] for g in resumed],
    )


def with_tokens(number: int, routed_experts: np.ndarray | None) -> Sample:
    return replace(make_sample(), tokens=np.zeros(31 + number, np.int32), prompt_len=1, routed_experts=routed_experts)


def with_routed_experts(number: int, rank: int) -> Group:
    """A scored sample and a draft, the routed experts of both on one rank."""
    group = make_group(number)
    held = [routed_experts_of(2 * number + i) if (number + 1) % 4 == rank else None for i in range(2)]
    return replace(group, samples=tuple(replace(s, routed_experts=r) for s, r in zip(group.samples, held, strict=True)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("kept")
    model = make_model(tmp_path_factory.mktemp("model"), "qwen3moe", num_hidden_layers=LAYERS)
    return folder, run_ranks(moves, 4, model, folder)


def test_routed_experts_are_where_a_sample_is_trained_on_and_nowhere_else(found: tuple[Path, list[Any]]) -> None:
    for rank, (own, have, _) in enumerate(found[1]):
        assert 0 < sum(own) < COUNT
        for number, (is_own, routed_experts) in enumerate(zip(own, have, strict=True)):
            stage = slice(0, 2) if rank < 2 else slice(2, 4)
            assert equal(routed_experts, routed_experts_of(number)[:, stage] if is_own else None), number


def test_a_response_that_is_resumed_has_its_routed_experts_there(found: tuple[Path, list[Any]]) -> None:
    """Six groups on four engines: one, two, one and two."""
    leaders = [0, 1, 1, 2, 3, 3]
    for rank, (_, _, groups) in enumerate(found[1]):
        for number, (scored, draft) in enumerate(groups):
            assert equal(scored, routed_experts_of(2 * number) if rank == (number + 1) % 4 else None)
            assert equal(draft, routed_experts_of(2 * number + 1) if rank == leaders[number] else None)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_checkpoint_has_all_routed_experts_and_gives_each_to_one_rank(
    found: tuple[Path, list[Any]], ranks: int
) -> None:
    parts = []
    for rank in range(ranks):
        carryover = Carryover()
        carryover.load(found[0], 9, lambda number: Prompt(7, (5, 6), "", "", {}), rank, ranks)
        assert [group.number for group in (*carryover.ready, *carryover.unfinished)] == list(range(6))
        parts.append(
            [sample.routed_experts for group in (*carryover.ready, *carryover.unfinished) for sample in group.samples]
        )
    for number, held in enumerate(zip(*parts, strict=True)):
        (routed_experts,) = [one for one in held if one is not None]
        assert equal(routed_experts, routed_experts_of(number))
