"""Long responses are trained on as often as they are sampled: thousands of steps of the real sampler, on an engine that
makes up tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlhpc.api import Completion, Prompt, Request, RewardResult, RunState, Sample
from rlhpc.config.schema import RunConfig
from rlhpc.data.prompts import Prompts, PromptSet
from rlhpc.rollout.requests import mixed_bits
from rlhpc.trainer.carryover import Carryover
from rlhpc.trainer.choosing import Chooser
from rlhpc.trainer.length_bias import count_dropped, count_trained, length_bias
from rlhpc.trainer.roles import EngineRank
from rlhpc.trainer.rollout import Rollout
from rlhpc.trainer.sampling import Sampler
from tests.data.test_groups import make_group

MEAN, LONGEST = 64, 384
_NORMAL = NormalDist()


def length_of(seed: int) -> int:
    """Length of a response: log-normal, truncated at six times the mean."""
    return max(1, min(LONGEST, round(MEAN * math.exp(_NORMAL.inv_cdf((mixed_bits(seed, 1) + 0.5) / 2**63) - 0.5))))


class Lengths:
    """An engine whose responses have tokens of no meaning and the length that their seed determines."""

    def __init__(self) -> None:
        self.now = 0
        self.begun: dict[int, int] = {}  # length of the longest response to a prompt
        self._open: dict[int, tuple[int, int]] = {}  # since when, for how many tokens
        self._ends: list[tuple[int, int]] = []

    def submit(self, key: int, request: Request) -> None:
        prompt, length = request.prompt[0], length_of(request.seed)
        self.begun[prompt] = max(length, self.begun.get(prompt, 0))
        left = length - (len(request.prompt) - 1)
        self._open[key] = (self.now, left)
        heapq.heappush(self._ends, (self.now + left, key))

    def step(self) -> list[tuple[int, Completion]]:
        self.now += 1
        done = []
        while self._ends and self._ends[0][0] <= self.now:
            _, key = heapq.heappop(self._ends)
            if key in self._open:
                done.append((key, _tokens(self._open.pop(key)[1])))
        return done

    def abort(self, keys: Sequence[int]) -> dict[int, Completion]:
        self._ends = []
        return {key: _tokens(self.now - self._open.pop(key)[0]) for key in keys}


class Scores:
    """Reward workers that score nothing."""

    def __init__(self) -> None:
        self._keys: list[int] = []

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        self._keys.append(key)

    def results(self) -> dict[int, RewardResult]:
        keys, self._keys = self._keys, []
        return dict.fromkeys(keys, RewardResult(1.0))


def _tokens(count: int) -> Completion:
    return Completion(np.zeros(count, np.int32), np.zeros(count, np.float32), truncated=False)


def keeps(samples: Sequence[Sample], share: float) -> bool:
    """Drops groups at random, regardless of their length."""
    return mixed_bits(samples[0].prompt_id) % 1000 < 1000 * share


@dataclass
class Run:
    """``began`` and ``trained``: lengths of groups that the engine began, and that steps trained on."""

    began: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    state: RunState = field(default_factory=RunState)


def simulate(
    steps: int, *, samples: int = 1, share: float = 1.0, replay: dict[str, Any] | None = None, **section: Any
) -> Run:
    """A run each step of which makes a policy version; ``share`` of the groups are kept by the filter."""
    dynamic = {"filter": "tests.trainer.test_length_bias:keeps", "arguments": {"share": share}, **section}
    config = RunConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "rollout": {"samples_per_prompt": samples, "max_response_tokens": LONGEST},
            "train": {"steps": steps, "prompts_per_step": 8, "dynamic_sampling": dynamic, "replay": replay},
        }
    )
    count = int(steps * 8 / share * 1.2) + 200  # no prompt twice
    numbers = np.arange(count + 1, dtype=np.int32)
    prompts = Prompts([Prompt(i, (), "", "", {}) for i in range(count)], numbers[:-1], numbers)
    engine = Lengths()
    rollout = Rollout(engine, EngineRank(0, 1, 1), config.rollout, 0, Scores(), None)
    carryover = Carryover.of(config.train)
    chooser = Chooser(config, PromptSet(prompts, 0, (range(count),)), carryover, None, 1, False)
    sampler = Sampler(rollout, chooser)
    found = Run()
    for _ in range(steps):
        sampled = sampler.sample(found.state)
        found.metrics.append(chooser.choose(found.state, sampled).metrics)
        new = sampled.groups[sampled.replayed :]
        found.trained += [max(sample.response_len for sample in group.samples) for group in new]
        found.state.step += 1
        found.state.policy_version += 1
    assert found.state.prompt_cursor <= count
    found.began = [length for prompt, length in engine.begun.items() if keeps([_of(prompt)], share)]
    return found


def _of(prompt: int) -> Sample:
    return Sample(prompt, 0, np.zeros(1, np.int32), 1, np.zeros(0, np.float32), 0.0, 0, truncated=False)


def share_of_longest(run: Run) -> float:
    """Share of the longest tenth of all groups begun among those trained on; of equal lengths a part counts."""
    edge, began, trained = np.quantile(run.began, 0.9), np.array(run.began), np.array(run.trained)
    part = (0.1 - (began > edge).mean()) / (began == edge).mean()
    return float((trained > edge).mean() + part * (trained == edge).mean())


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.heavy
def test_the_longest_tenth_of_groups_is_a_tenth_of_those_trained_on() -> None:
    found = simulate(2000, oversample=2.0, max_staleness=4)
    assert len(found.trained) == 2000 * 8
    assert share_of_longest(found) == pytest.approx(0.1, abs=0.005)
    assert sum(metrics["sampling/stale_groups"] for metrics in found.metrics) == 0
    assert max(metrics["sampling/staleness_max"] for metrics in found.metrics) == 4, "the bound is reached"
    first, *_, last = (metrics["sampling/length_bias"] for metrics in found.metrics)
    assert first < 0.95, "the first step has short ones"
    assert last == pytest.approx(1, abs=0.002)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("section", "replay"),
    [
        ({"oversample": 1.5, "max_staleness": 1, "share": 0.5}, None),
        ({"oversample": 4.0, "max_staleness": 2}, None),
        ({"oversample": 3.0, "max_staleness": 1, "share": 0.7}, {"capacity": 64, "fraction": 0.5}),
        ({"oversample": 2.0, "max_staleness": 0}, None),
        ({"oversample": 1.0, "max_staleness": 0}, None),
    ],
)
def test_nothing_that_was_begun_is_lost_or_too_stale(section: dict[str, Any], replay: dict[str, Any] | None) -> None:
    found = simulate(150, samples=3, replay=replay, **section)
    carried = found.metrics[-1]["sampling/kept_groups"] + found.metrics[-1]["sampling/carried_groups"]
    assert 0 <= len(found.began) - len(found.trained) <= carried
    for metrics in found.metrics:
        assert (metrics["sampling/stale_groups"], metrics["sampling/missing_groups"]) == (0, 0)
        if replay is None:
            assert metrics["sampling/staleness_max"] <= section["max_staleness"]
    if replay is None:
        assert len(found.trained) == 150 * 8


def test_the_bias_compares_what_was_trained_on_with_all_that_was_begun() -> None:
    def group(length: int, unfinished: int = 0) -> Any:
        tokens = (np.zeros(1 + n, np.int32) for n in (length, unfinished or length))
        samples = (make_group(0, tokens=one, prompt_len=1).samples[0] for one in tokens)
        return replace(make_group(0), samples=tuple(samples))

    state = RunState()
    assert length_bias(state, []) is None
    count_trained(state, [group(10), group(20)])
    assert length_bias(state, []) == 1
    assert length_bias(state, [group(30)]) == pytest.approx(15 / 20)
    count_dropped(state, [group(60)])
    assert length_bias(state, [group(30)]) == pytest.approx(15 / 30)
    blank = replace(group(30), samples=(make_group(0, tokens=np.zeros(1, np.int32), prompt_len=1).samples[0],) * 2)
    assert length_bias(state, [group(30), blank]) == pytest.approx(15 / 30), "responses that have not begun"
