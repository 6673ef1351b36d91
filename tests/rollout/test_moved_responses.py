"""Responses that move between two real engines, and that take turns, become what they become without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlhpc.api import Prompt, RunState
from rlhpc.config.rollout import RolloutSection
from rlhpc.rollout.requests import Sampling, Task, blank_draft, share_of
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.trainer.roles import EngineRank
from rlhpc.trainer.rollout import Rollout
from tests.helpers.distributed import run_ranks
from tests.rollout import engines

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

GROUPS, SAMPLES, SLOTS = 6, 3, 3
WAYS = ("equal", "longest_first", "turns")


def all_tasks() -> list[Task]:
    """Those of the first engine's share are short, those of the second's are long."""
    tasks = []
    for group in range(GROUPS):
        prompt = Prompt(group, tuple(range(5 + group, 25 + group)), "", "", {})
        for index in range(SAMPLES):
            longest = 6 if group < GROUPS // 2 else 24 + 8 * ((group + index) % 3)
            own = Sampling(max_tokens=longest, temperature=1.0, top_p=1.0)
            tasks.append(Task(group, index, prompt, blank_draft(prompt, 3), (1, 2, group, index), sampling=own))
    return tasks


def dealt(rollout: Rollout, way: str, experts: bool) -> dict[str, Any]:
    """What this rank's engine has at the end, and what it took."""
    place = rollout.place
    rollout.section = rollout.section.model_copy(update={"dealing": way})
    long = range(GROUPS // 2, GROUPS)
    dealer = rollout.dealer(
        RunState(policy_version=3), Sampling(60, 1.0, 1.0), lambda group: 2.0 if group in long else 0.5, 30.0
    )
    tasks = all_tasks()
    dealer.begin([tasks[i] for i in share_of(len(tasks), place.engines, place.index)], most=len(tasks) // place.engines)
    dealer.advance()
    found = {}
    for scored in dealer.collector.harvest():
        sample = scored.sample
        assert (sample.routed_experts is not None) == experts
        found[scored.group, scored.index] = sample
    return {
        "found": found,
        "steps": dealer.collector.steps,
        "moved": dealer.moved,
        "put_back": dealer.put_back,
        "begun": dict(dealer.collector._unfinished),
    }


def on_rank(path: Path, tp: int, experts: bool, ways: Sequence[str]) -> dict[str, Any]:
    engine = engines.build(path, tp, routed_experts=experts, max_num_seqs=SLOTS)
    engines.sync(engine, path) if tp == 1 else engines.write(engine, path, engines.EngineLayout(tp))
    engine.wake_cache()
    found = dealing_of(engine, tp, experts, ways)
    engine.shutdown()
    return found


def dealing_of(engine: VllmEngine, tp: int, experts: bool, ways: Sequence[str]) -> dict[str, Any]:
    """What this rank's engine has at the end, by way of dealing."""
    place = EngineRank(dist.get_rank(), dist.get_world_size(), tp)
    section = RolloutSection(tp=tp, max_num_seqs=SLOTS)
    workers = engines.GoodRewards() if place.leads else None
    rollout = Rollout(engine, place, section, 0, workers, None)  # type: ignore[arg-type]
    return {way: dealt(rollout, way, experts) for way in ways}


def joined(ranks: Sequence[dict[str, Any]], way: str) -> dict[tuple[int, int], Any]:
    parts = [rank[way]["found"] for rank in ranks]
    assert sum(map(len, parts)) == GROUPS * SAMPLES, "one on two engines, or on none"
    return {place: sample for part in parts for place, sample in part.items()}


def check(ranks: Sequence[dict[str, Any]], ways: Sequence[str], experts: bool) -> None:
    plain = joined(ranks, "equal")
    assert {place: len(sample.log_probs) for place, sample in plain.items()} == {
        (task.group, task.index): task.sampling.max_tokens for task in all_tasks() if task.sampling
    }
    for way in ways[1:]:
        found = joined(ranks, way)
        for place, sample in plain.items():
            other = found[place]
            np.testing.assert_array_equal(other.tokens, sample.tokens, err_msg=f"{way} {place}")
            np.testing.assert_allclose(other.log_probs, sample.log_probs, atol=1e-5)
            assert replace(other, **dict.fromkeys(("tokens", "log_probs", "routed_experts"))) == replace(
                sample, **dict.fromkeys(("tokens", "log_probs", "routed_experts"))
            )
            if experts:
                np.testing.assert_array_equal(other.routed_experts, sample.routed_experts)
        steps = {name: max(rank[name]["steps"] for rank in ranks) for name in ("equal", way)}
        assert steps[way] < 0.75 * steps["equal"], steps
        assert all(not any(rank[way]["begun"].values()) for rank in ranks)
        assert {(rank[way]["moved"] > 0, rank[way]["put_back"] > 0) for rank in ranks} == {(True, way == "turns")}


def test_responses_are_the_same_however_they_are_dealt(models: Path) -> None:
    path = models / "qwen3" / "a"
    check(run_ranks(on_rank, 2, path, 1, False, WAYS), WAYS, experts=False)


@pytest.mark.long
def test_with_several_ranks_for_each_engine(models: Path) -> None:
    path = models / "qwen3" / "a"
    check(run_ranks(on_rank, 4, path, 2, False, WAYS), WAYS, experts=False)


@pytest.mark.long
def test_routed_experts_move_along(models: Path) -> None:
    path = models / "qwen3moe" / "a"
    check(run_ranks(on_rank, 2, path, 1, True, WAYS), WAYS, experts=True)
