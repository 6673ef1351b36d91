"""Compares runs with the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.float64.answers import answer_of
from tests.float64.drive import RunRecord, StepRecord, Tables, run_seeds
from tests.float64.reference import Expected, Reference, float32
from tests.float64.script import FIRST, GREEDY
from tests.helpers.distributed import run_ranks

KINDS = ("metrics", "gradients", "weights")
LIMIT = 1e-6


@dataclass
class Difference:
    """A seed's largest relative differences by what is compared, where the largest is, and what the run has."""

    seed: int
    algorithm: str
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    where: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, where: str, difference: float) -> None:
        if not (difference <= self.largest[kind] or np.isnan(self.largest[kind])):
            self.largest[kind], self.where[kind] = difference, where


def run_and_compare(seeds: Sequence[int]) -> list[Difference]:
    """Runs each seed on two ranks."""
    by_rank = run_ranks(run_seeds, 2, seeds)
    return [compared(records) for records in zip(*by_rank, strict=True)]


def total_counts(found: Sequence[Difference]) -> dict[str, int]:
    """What the runs have, 0 included."""
    return {name: sum(each.counts[name] for each in found) for each in found for name in each.counts}


def compared(records: Sequence[RunRecord], stored: Callable[[float], float] = float32) -> Difference:
    """The run of a seed, as each rank recorded it, against the reference. Raises AssertionError if a step's samples or
    their division are not what they must be."""
    ours = records[0]
    reference = Reference(ours, stored)
    for other in records[1:]:
        ours.emitted.update(other.emitted)
    found = Difference(ours.seed, reference.config.algorithm.name)
    for number in range(len(ours.steps)):
        steps = [record.steps[number] for record in records]
        _check_samples(reference, steps[0])
        minibatches = {name: _minibatches(reference, steps, name) for name in steps[0].updates}
        expected = reference.step(steps[0], minibatches)
        found.counts["responses left out"] += _left_out(reference, steps[0])
        found.counts["epochs in another order"] += sum(
            _reordered(updates, reference.config.train.minibatches) for updates in minibatches.values()
        )
        found.counts["updates"] += sum(map(len, expected.gradients.values()))
        for step in steps:
            _compare(found, f"step {number + 1}", step, expected)
    found.counts.update(reference.counts)
    return found


def _compare(found: Difference, where: str, step: StepRecord, expected: Expected) -> None:
    for name, value in expected.metrics.items():
        ours = step.metrics.get(name, np.nan)
        found.add("metrics", f"{where}: {name} {ours:.9g}, not {value:.9g}", abs(ours - value) / max(abs(value), 1.0))
    for model, updates in step.updates.items():
        assert len(updates) == len(expected.gradients[model]), f"{where}: updates of the {model}"
        for number, (update, gradient) in enumerate(zip(updates, expected.gradients[model], strict=True), 1):
            place = f"{where}: update {number} of the {model}"
            found.add("gradients", place, _distance(update["gradient"], gradient))
        place = f"{where}: {model}"
        found.add("weights", place, _distance(step.weights[model], expected.weights[model]))


def _distance(ours: Tables, expected: Tables) -> float:
    """Largest difference of an element, relative to the largest element."""
    most = max(float(np.abs(table).max()) for table in expected.values())
    apart = max(float(np.abs(ours[name] - table).max()) for name, table in expected.items())
    return apart / most if most else apart


def _minibatches(reference: Reference, steps: Sequence[StepRecord], model: str) -> list[list[int]]:
    """Places of the samples of each update over all ranks. Checks that each epoch has each sample once, in minibatches
    whose sizes differ by at most one."""
    train, count = reference.config.train, len(steps[0].trained)
    layout = reference.config.critic.parallel if model == "critic" else reference.config.actor.parallel
    assert layout is not None
    ranks = steps if layout.tp * layout.cp == 1 else steps[:1]  # otherwise both have the same
    updates = [
        sorted(i for step in ranks for batch in step.updates[model][number]["ids"] for i in batch)
        for number in range(len(steps[0].updates[model]))
    ]
    assert len(updates) in (0, train.epochs * train.minibatches), f"{len(updates)} updates"
    for start in range(0, len(updates), train.minibatches):
        epoch = updates[start : start + train.minibatches]
        assert sorted(i for ids in epoch for i in ids) == list(range(count)), f"an epoch trains on {epoch}"
        assert train.shuffle or epoch == updates[: train.minibatches], f"an epoch in another order: {epoch}"
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1, f"sizes of minibatches {epoch}"
    return updates


def _check_samples(reference: Reference, step: StepRecord) -> None:
    """Checks that a group has all of its responses whose reward did not fail and, where the algorithm needs it, a
    greedy response whose reward did not fail."""
    config, groups = reference.config, dict[int, list[int]]()
    for prompt_id, first in step.trained:
        groups.setdefault(prompt_id, []).append(first - FIRST)
    for prompt_id, places in groups.items():
        every = range(config.rollout.samples_per_prompt)
        good = [place for place in every if not answer_of(reference.seed, prompt_id, place).dropped]
        assert sorted(places) == good, f"prompt {prompt_id} is trained on responses {sorted(places)}, not {good}"
        if config.algorithm.name == "remax":
            assert not answer_of(reference.seed, prompt_id, GREEDY).dropped, f"prompt {prompt_id} has no baseline"


def _left_out(reference: Reference, step: StepRecord) -> int:
    """Responses of the step's groups whose reward failed."""
    prompts = {prompt_id for prompt_id, _ in step.trained}
    return len(prompts) * reference.config.rollout.samples_per_prompt - len(step.trained)


def _reordered(updates: list[list[int]], minibatches: int) -> int:
    """Epochs whose minibatches are not those of the first."""
    epochs = [updates[start : start + minibatches] for start in range(0, len(updates), minibatches)]
    return sum(epoch != epochs[0] for epoch in epochs)
