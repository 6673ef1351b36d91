"""Which placement a search finds: separate for long-tailed lengths, colocated for short even ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import read_model
from rlhpc.plan import placements as placements_module
from rlhpc.plan.back_ends import search_counts
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.step_time import StepTime, predict_step
from rlhpc.plan.placements import Placements, compare_placements
from rlhpc.plan.search import SearchResult, search
from rlhpc.rollout.schedule.generation_load import Simulated
from rlhpc.sharding.placement import engine_ranks, judge_ranks

READY = Path(__file__).parents[2] / "configs" / "ready"
LONG = ("planning.response_spread=1", "planning.response_tokens=2000", "rollout.max_response_tokens=16000")
SHORT = ("planning.response_spread=0", "planning.response_tokens=100")
JUDGES = ("algorithm.kl.coefficient=0.01", "judges.ranks=1", "reference.on=judges")
HALVES = ("placement=separate", "rollout.ranks=2", "rollout.gpu_memory_utilization=0.9")


def config_of(*changes: str) -> RunConfig:
    return load_config(READY / "qwen2.5-1.5b-1gpu.yaml", ["resources.ranks_per_node=4", *changes])


@cache
def found_for(*changes: str) -> SearchResult:
    config = config_of(*changes)
    ranks = config.world_size - (engine_ranks(config) or 0) - judge_ranks(config)
    return search(config, read_model(config.model.path), ranks, GPUS["h100"], config.site.efficiency)


def compared(config: RunConfig, found: SearchResult) -> Placements:
    return compare_placements(config, read_model(config.model.path), GPUS["h100"], config.site.efficiency, found)


def test_long_tailed_lengths_find_ranks_of_their_own() -> None:
    found = found_for(*LONG)
    placements = compared(config_of(*LONG), found)
    separate = placements.separate
    assert placements.colocated is found.best[0]
    assert separate is not None
    assert placements.splits == 3
    assert placements.speedup is not None
    assert placements.speedup > 1.1
    assert separate.memory.first_too_large is None
    assert separate.fragment["rollout"] == {"tp": 2, "ranks": separate.step.engine_ranks, "gpu_memory_utilization": 0.9}
    # The keys alone make the same plan.
    words = [f"rollout.ranks={separate.step.engine_ranks}", "placement=separate"]
    words += ["rollout.tp=2", "rollout.gpu_memory_utilization=0.9"]
    again = config_of(*LONG, *words, f"train.tokens_per_microbatch={separate.config.train.tokens_per_microbatch}")
    assert again.placement == separate.config.placement
    assert again.rollout == separate.config.rollout
    step = predict_step(
        separate.config, read_model(again.model.path), separate.layout, GPUS["h100"], again.site.efficiency
    )
    assert step.seconds == separate.step.seconds


@pytest.mark.heavy
def test_long_tailed_lengths_find_trainers_that_lend() -> None:
    placements = compared(config_of(*LONG), found_for(*LONG))
    lend, lending = placements.lend, placements.lending
    assert placements.simulated is not None
    assert lend is not None
    assert lending is not None
    assert lending.lend_seconds > 0
    assert lending.idle_trainers <= 0.5 * placements.simulated[1].idle_trainers
    assert placements.lend_speedup is not None
    assert (placements.lend_speedup >= 1.01) == (placements.winner is lend)
    assert lend.memory.first_too_large is None
    assert {phase.role for phase in lend.memory.phases if phase.name == "rollout"} == {"all", "engines"}
    assert (lend.fragment["placement"], lend.config.rollout.gpu_memory_utilization) == ("lend", 0.5)
    again = compared(lend.config, SearchResult((lend,), 1, 1, 1))
    assert again.lending is not None
    assert again.lending.step_seconds <= lending.step_seconds
    assert again.separate is not None
    assert again.separate.config.placement == "separate"
    assert again.separate.config.rollout.gpu_memory_utilization == 0.9


@pytest.mark.heavy
def test_trainers_that_lend_leave_judges_their_ranks() -> None:
    changes = (*LONG, *HALVES, *JUDGES, "rollout.ranks=1")
    placements = compared(config_of(*changes), found_for(*changes))
    for found in (placements.separate, placements.lend):
        assert found is not None
        assert judge_ranks(found.config) == 1
        assert found.layout.world_size + found.step.engine_ranks + 1 == 4
    assert placements.lend is not None
    assert placements.lend.config.placement == "lend"
    assert placements.lending is not None
    assert placements.colocated is not None
    assert (judge_ranks(placements.colocated.config), placements.colocated.layout.world_size) == (0, 4)


def test_the_split_with_the_shortest_simulated_step_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def simulated(config: RunConfig, shape: object, step: StepTime, *machine: object) -> Simulated:
        tried.append(step.engine_ranks)
        return Simulated(10.0 - (len(tried) == 2), 0.0, 0.0)

    monkeypatch.setattr(placements_module, "simulate", simulated)
    monkeypatch.setattr(placements_module, "_CLOSE", 10.0)
    placements = compared(config_of(*LONG), found_for(*LONG))
    assert len(tried) > 3, "the last is the colocated one"
    assert placements.separate is not None
    assert placements.separate.step.engine_ranks == tried[1]


def test_short_even_lengths_find_generation_in_turn() -> None:
    placements = compared(config_of(*SHORT), found_for(*SHORT))
    assert placements.winner is placements.colocated
    assert placements.speedup is not None
    assert placements.speedup < 1


def test_staleness_0_does_not_pay() -> None:
    speedup = compared(config_of(*LONG, "asynchrony.max_staleness=0"), found_for(*LONG)).speedup
    assert speedup is not None
    assert speedup < 1, "each side waits for the other"


def test_a_configured_split_is_compared_with_the_others_and_with_none() -> None:
    changes = (*LONG, *HALVES, "rollout.ranks=3")
    found = found_for(*changes)
    placements = compared(config_of(*changes), found)
    assert placements.colocated is not None
    assert placements.colocated.config.rollout.gpu_memory_utilization == 0.6
    assert placements.separate is not None
    assert placements.separate.step.seconds <= found.best[0].step.seconds
    assert {best.layout.world_size for best in found.best} == {1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("resources.ranks_per_node=1",), "a job of one rank has none to spare"),
        (("reshard.share_weights=true",), "reshard.share_weights: engines on ranks of their own cannot share"),
    ],
)
def test_what_allows_no_ranks_of_their_own_is_named(changes: tuple[str, ...], reason: str) -> None:
    found = found_for(*SHORT)
    placements = compared(config_of(*SHORT, *changes), found)
    assert placements.separate is None
    assert placements.winner is placements.colocated is found.best[0]
    assert placements.reason.startswith(reason)


def test_numbers_of_gpus_keep_the_share_of_ranks_that_generate() -> None:
    config = config_of(*HALVES, "rollout.ranks=1", "slurm.nodes=2", "resources.ranks_per_node=2")
    gpus = (2, 4, 8, 16)
    found = list(search_counts(config, read_model(config.model.path), GPUS["h100"], config.site.efficiency, gpus))
    steps = {one.gpus: one.best.step.engine_ranks for one in found if one.best is not None}
    assert steps == {4: 1, 8: 2, 16: 4}
    assert found[0].reason == "the shares of ranks that train and that do not need a multiple of 4 GPUs"
