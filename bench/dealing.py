"""Engine steps of a step's rollout by each way of dealing, simulated with the run's own rules.

    python -m bench.dealing [--seeds 5] [--out FILE.md]

256 prompts with 8 responses each; log-normal lengths of spread 1, at most 5 times the mean, half of the variance within
a prompt. The bound is the longest response, or the tokens over all slots if that is more. An engine step gives each
response that runs on an engine a token, and all engines step alike.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from rlhpc.rollout.dealing import EngineReport, Rules, deal
from rlhpc.rollout.requests import share_of
from rlhpc.rollout.schedule.response_order import ExpectedLengths, Unfinished, interval_of, turn_of

PROMPTS, SAMPLES, MEAN, CAP = 256, 8, 1000, 5
WAYS = ("equal", "longest_first", "turns")


@dataclass
class Work:
    """Lengths [prompts, samples] of a step, and of the same prompts' responses in an earlier one."""

    lengths: np.ndarray
    earlier: np.ndarray

    @classmethod
    def drawn(cls, seed: int) -> Work:
        draw = np.random.default_rng(seed)
        spread = 0.5**0.5
        of_prompt = draw.normal(0, spread, (PROMPTS, 1))

        def lengths() -> np.ndarray:
            logs = of_prompt + draw.normal(0, spread, (PROMPTS, SAMPLES))
            return np.clip(np.exp(logs - 0.5) * MEAN, 1, CAP * MEAN).astype(int)

        return cls(lengths(), lengths())

    def expected(self, *, known: bool) -> ExpectedLengths:
        """Lengths that a run expects, from its second visit to the prompts on if ``known``."""
        ratios = self.earlier.mean(1) / self.earlier.mean()
        of: Callable[[int], float] = (lambda group: float(ratios[group])) if known else (lambda group: 1.0)
        return ExpectedLengths(of, float(self.earlier.mean()))


@dataclass
class Result:
    steps: int = 0
    prefilled: int = 0  # tokens computed again for responses that were put back
    moved: int = 0


class Engines:
    """Engines that generate a step's responses."""

    def __init__(self, work: Work, engines: int, slots: int) -> None:
        self._slots, self._lengths = slots, work.lengths
        groups = [share_of(PROMPTS, engines, engine) for engine in range(engines)]
        self.queues = [[(g, i) for g in share for i in range(SAMPLES)] for share in groups]
        self.tokens = {place: 0 for queue in self.queues for place in queue}
        self.running: list[set[tuple[int, int]]] = [set() for _ in groups]
        self._ended: list[list[tuple[tuple[int, int], int]]] = [[] for _ in groups]
        self.result = Result()

    @property
    def busy(self) -> bool:
        return any(self.queues)

    def run(self, steps: int | None) -> None:
        """Runs each engine in the order of its queue, for ``steps`` engine steps at most."""
        taken = []
        for engine, queue in enumerate(self.queues):
            free = [(0, slot) for slot in range(min(self._slots, len(queue)))]
            last, running = 0, set()
            for place in queue:
                now, slot = heapq.heappop(free)
                if steps is not None and now >= steps:
                    heapq.heappush(free, (now, slot))
                    break
                if self.tokens[place] and place not in self.running[engine]:
                    self.result.prefilled += self.tokens[place]
                left = int(self._lengths[place]) - self.tokens[place]
                count = left if steps is None else min(left, steps - now)
                self.tokens[place] += count
                last = max(last, now + count)
                heapq.heappush(free, (now + count, slot))
                if count == left:
                    self._ended[engine].append((place, int(self._lengths[place])))
                else:
                    running.add(place)
            ended = {place for place, _ in self._ended[engine]}
            self.queues[engine] = [place for place in queue if place not in ended]
            self.running[engine] = running
            taken.append(last)
        self.result.steps += max(taken)

    def reports(self) -> list[EngineReport]:
        found = []
        for queue, running, ended in zip(self.queues, self.running, self._ended, strict=True):
            held = tuple(Unfinished(place, self.tokens[place], place in running) for place in queue)
            found.append(EngineReport(held, tuple(ended)))
            ended.clear()
        return found


def simulate(work: Work, engines: int, slots: int, way: str, *, known: bool) -> Result:
    """Engine steps of one step."""
    world, expected = Engines(work, engines, slots), work.expected(known=known)
    rules = Rules(slots, turn=turn_of(work.earlier.mean()) if way == "turns" else None)
    interval = interval_of(work.earlier.mean())
    while world.busy:
        waits = False
        if way != "equal":
            reports = world.reports()
            expected.note((group, length) for report in reports for (group, _), length in report.ended)
            dealt = deal(reports, rules, expected)
            held = {one.place: engine for engine, report in enumerate(reports) for one in report.unfinished}
            moves = sum(held[place] != engine for engine, hand in enumerate(dealt.engines) for place in hand)
            world.result.moved += moves
            world.queues, waits = [list(hand) for hand in dealt.engines], dealt.waits
        world.run(interval if waits else None)
    return world.result


def table(seeds: int) -> str:
    """Steps over the bound, mean and worst of the seeds, for each number of engines and of responses per place; in how
    many seeds there are more than with equal shares."""
    head = ("engines", "per place", "places", "dealing", "known", "steps / bound", "worst", "more than equal")
    lines = [f"| {' | '.join((*head, 'prefilled again', 'moved'))} |", "| --- " * 10 + "|"]
    works = [Work.drawn(seed) for seed in range(seeds)]
    for engines, waves in product((1, 2, 8, 64), (1, 4, 16)):
        slots = PROMPTS * SAMPLES // (engines * waves)
        equal = [simulate(work, engines, slots, "equal", known=False) for work in works]
        lines.append(_line((engines, waves, slots, "equal", "-"), works, equal, equal))
        for way, known in product(WAYS[1:], (False, True)):
            found = [simulate(work, engines, slots, way, known=known) for work in works]
            lines.append(_line((engines, waves, slots, way, "yes" if known else "no"), works, found, equal))
    return "\n".join(lines) + "\n"


def _line(names: Sequence[object], works: Sequence[Work], found: Sequence[Result], equal: Sequence[Result]) -> str:
    places, responses = int(str(names[0])) * int(str(names[2])), PROMPTS * SAMPLES
    totals = [int(work.lengths.sum()) for work in works]
    bounds = [max(int(work.lengths.max()), total / places) for work, total in zip(works, totals, strict=True)]
    ratios = [one.steps / bound for one, bound in zip(found, bounds, strict=True)]
    more = sum(one.steps > other.steps for one, other in zip(found, equal, strict=True))
    again = np.mean([one.prefilled / total for one, total in zip(found, totals, strict=True)])
    moved = np.mean([one.moved / responses for one in found])
    numbers = f"{np.mean(ratios):.2f} | {max(ratios):.2f} | {more} | {again:.2f} | {moved:.2f}"
    return f"| {' | '.join(map(str, names))} | {numbers} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = table(arguments.seeds)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
