"""Step time with engines on ranks of their own by the order of responses in an engine, by simulation.

    python -m bench.separate_dealing [--seeds 4] [--out FILE.md]

The engines' own schedule and order (``rlhpc/rollout/schedule``); log-normal lengths of spread 1, at most 5 times the
mean, half of the variance within a prompt, known from an earlier step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path
from statistics import mean

from rlhpc.rollout.schedule.generation_load import GenerationLoad, SampledLengths, Simulated
from rlhpc.rollout.schedule.response_order import Dealing
from rlhpc.rollout.schedule.simulator import SeparateJob

STEPS, WARM = 20, 5
LOADS = ((4, 16, 16, 16), (4, 32, 16, 8), (2, 16, 8, 16), (4, 128, 8, 64))  # engines, groups, samples, slots
PREFILL_SECONDS = 0.05e-3  # of a token that is computed again; one that is generated adds 0.1 ms to a step of 50 ms
WAYS: tuple[Dealing, ...] = ("longest_first", "turns")


class PromptLengths(SampledLengths):
    """Lengths of which half of the variance is that of prompts, which had other responses before."""

    def __init__(self, load: GenerationLoad) -> None:
        super().__init__(load)
        self._mean = self.mean

    def __getitem__(self, group: int) -> list[int]:
        while len(self._groups) <= group:
            middle, spread = self._rng.gauss(self._mu, self._load.spread * sqrt(0.5)), self._load.spread * sqrt(0.5)

            def one(middle: float = middle, spread: float = spread) -> int:
                return max(1, min(self._load.most_tokens, round(exp(self._rng.gauss(middle, spread)))))

            self.ratios[len(self._groups)] = mean(one() for _ in range(self._load.samples_per_group)) / self._mean
            self._groups.append([one() for _ in range(self._load.samples_per_group)])
        return self._groups[group]


def simulate(load: GenerationLoad, max_staleness: int, lend: float) -> Simulated:
    """``lend``: seconds in which trainers' ranks generate."""
    lengths = PromptLengths(load)
    lengths[(STEPS + max_staleness + 3) * load.groups_per_step]  # so that all ratios are there
    costs = load.costs(lend=lend)
    job = SeparateJob(load, (max_staleness, STEPS, WARM), costs, "recompute")
    job.lengths = lengths
    return job.run()


def table(seeds: int) -> str:
    """Step time over that of responses as they come, mean and worst of the seeds."""
    head = ("engines", "groups", "responses", "places", "staleness", "lend", *WAYS, "turns, prompt tokens free")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for engines, groups, samples, slots in LOADS:
        load = GenerationLoad(engines, groups, samples, slots, 50e-3, 0.1e-3, 1.0, 1000, 5000, jitter=0.0)
        load = replace(load, train_seconds=0.7 * load.full_seconds, prefill_seconds=PREFILL_SECONDS)
        for most, lends in ((0, False), (1, False), (1, True), (2, False)):
            one, lend = replace(load, lenders=engines if lends else 0), 0.5 * load.full_seconds if lends else 0.0
            free = replace(one, prefill_seconds=0.0)
            found = [
                *(_ratio(one, way, (most, lend), seeds) for way in WAYS),
                _ratio(free, "turns", (most, lend), seeds),
            ]
            cells = (engines, groups, samples, slots, most, "yes" if lends else "no", *found)
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def _ratio(load: GenerationLoad, way: Dealing, terms: tuple[int, float], seeds: int) -> str:
    """``terms``: maximum staleness, and seconds in which trainers' ranks generate."""
    found = []
    for seed in range(seeds):
        equal = simulate(replace(load, seed=seed), *terms)
        found.append(simulate(replace(load, dealing=way, seed=seed), *terms).step_seconds / equal.step_seconds)
    return f"{mean(found):.3f} ({max(found):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = table(arguments.seeds)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
