"""What a step generates, how long an engine takes for it, and a colocated step. Times are in seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import log, sqrt
from operator import itemgetter

from rlhpc.rollout.schedule.terms import Costs

Bundle = list[tuple[int, int]]  # requests: steps until each ends, its group


@dataclass(frozen=True)
class GenerationLoad:
    """What a step generates and trains on, and how long that takes."""

    engines: int
    groups_per_step: int
    samples_per_group: int
    slots: int  # sequences that an engine runs at once
    step_seconds: float  # of an engine's step without its sequences
    sequence_seconds: float  # of each sequence in it
    train_seconds: float  # of a batch of mean length, from its last response to the trained weights
    mean_tokens: float  # of a response
    most_tokens: int
    spread: float = 1.0  # of the logarithm of lengths
    sync_seconds: float = 0.0  # from the trained weights to engines that can take them over
    switch_seconds: float = 0.0  # in which an engine stands still to take them over
    prefill_seconds: float = 0.0  # of each token of responses in flight that it then computes again
    prompt_tokens: float = 0.0  # of a response, computed again with it
    kept: float = 1.0  # share of groups that the filter keeps
    lenders: int = 0  # engines of the trainers' ranks, if these generate while they would wait
    lend_overhead_seconds: float = 0.0  # in which these ranks neither train nor generate, to change over
    jitter: float = 0.05  # spread of the duration of every single step
    seed: int = 0

    @property
    def full_seconds(self) -> float:
        """Time of the engines for a step's responses if all slots were always full."""
        tokens = self.groups_per_step / self.kept * self.samples_per_group * SampledLengths(self).mean
        return tokens / (self.engines * self.slots) * (self.step_seconds + self.sequence_seconds * self.slots)

    def costs(self, wrong: float = 1.0, lend: float = 0.0) -> Costs:
        """Constants of virtual time, with trainers' time wrong by a factor. ``lend``: in which their ranks generate."""
        train = (self.train_seconds + self.sync_seconds) * wrong
        return Costs.of_seconds(self.step_seconds, self.sequence_seconds, train, lend=lend)


def reduced(load: GenerationLoad, most_responses: int = 4096) -> GenerationLoad:
    """About the same in less time: of a step with more responses a part of the engines, with their part of the groups.
    The training time stays; the longest response is a little shorter, because there are fewer."""
    parts = -(-load.groups_per_step * load.samples_per_group // most_responses)
    engines = max(1, load.engines // max(1, parts))
    groups = max(1, round(load.groups_per_step * engines / load.engines))
    return replace(load, engines=engines, groups_per_step=groups)


@dataclass(frozen=True)
class Simulated:
    """Mean over the simulated steps, without the first ones."""

    step_seconds: float
    idle_engines: float  # share of the time; of a rank that does both, the time in which it does neither
    idle_trainers: float
    staleness: float = 0.0  # mean over groups, of their first tokens, in steps
    max_staleness: int = 0
    lend_seconds: float = 0.0  # in which trainers' ranks generate


class SampledLengths:
    """Log-normal lengths of each group's responses, of which the longest are cut. Determined by the seed."""

    def __init__(self, load: GenerationLoad) -> None:
        self._load, self._rng = load, random.Random(load.seed)
        self._mu = log(load.mean_tokens) - load.spread**2 / 2
        self._groups: list[list[int]] = []

    def __getitem__(self, group: int) -> list[int]:
        while len(self._groups) <= group:
            self._groups.append([self._one(self._rng) for _ in range(self._load.samples_per_group)])
        return self._groups[group]

    @property
    def mean(self) -> float:
        """Mean length after the cut."""
        rng = random.Random(7)
        return sum(self._one(rng) for _ in range(4000)) / 4000

    def _one(self, rng: random.Random) -> int:
        return max(1, min(self._load.most_tokens, round(rng.lognormvariate(self._mu, self._load.spread))))


@dataclass
class ModelEngine:
    """Requests of an engine. The first ``slots`` run; the others wait."""

    slots: int
    steps: int = 0
    running: list[tuple[int, int, int, int]] = field(default_factory=list)  # heap of (last step, place, group, length)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (length, group)
    left: dict[int, int] = field(default_factory=dict)  # responses of each group that have not ended
    places: int = 0  # taken in the order in which requests run

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def admit(self, group: int, lengths: Sequence[int]) -> None:
        self.left[group] = len(lengths)
        self.waiting.extend((length, group) for length in lengths)
        self._fill()

    @property
    def generated(self) -> int:
        """Tokens so far of the running responses, of those that lenders have returned since then."""
        return sum(self.steps - (last - length) for last, *_, length in self.running)

    def until_end(self) -> int:
        """Steps until the next response ends."""
        return self.running[0][0] - self.steps

    def advance(self, steps: int) -> list[int]:
        """Makes steps in which all running requests go on. Returns the groups that have ended."""
        self.steps += steps
        ended = []
        while self.running and self.running[0][0] <= self.steps:
            ended += self._end(heappop(self.running)[2])
        self._fill()
        return ended

    def withdraw(self, each: int, lenders: int) -> list[Bundle]:
        """Takes the last requests away, so many for each lender."""
        count = each * lenders
        found = [self.waiting.pop() for _ in range(min(count, len(self.waiting)))][::-1]
        if len(found) < count:
            self.running.sort(key=itemgetter(1))
            first = len(self.running) - (count - len(found))
            found = [(last - self.steps, group) for last, _, group, _ in self.running[first:]] + found
            del self.running[first:]
            heapify(self.running)
        return [found[place * each : (place + 1) * each] for place in range(lenders)]

    def take_back(self, bundle: Bundle) -> list[int]:
        """Has requests again, of which those that have 0 steps left have ended. Returns the groups that have ended."""
        ended = [group for length, one in bundle if not length for group in self._end(one)]
        self.waiting.extend(request for request in bundle if request[0])
        self._fill()
        return ended

    def _end(self, group: int) -> list[int]:
        """A response has ended, and perhaps its group."""
        self.left[group] -= 1
        if self.left[group]:
            return []
        del self.left[group]
        return [group]

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, group = self.waiting.popleft()
            self.places += 1
            heappush(self.running, (self.steps + length, self.places, group, length))


def lent_steps(costs: Costs, bundle: Bundle, window: int) -> Iterator[tuple[int, int]]:
    """Yields how many steps of how many requests a lender makes, until the first that reaches the virtual time
    ``window`` or has no request left."""
    lengths, clock, done = sorted(length for length, _ in bundle), 0, 0
    while lengths and clock < window:
        cost = costs.engine_step(len(lengths))
        steps = min(lengths[0] - done, -((clock - window) // cost))
        yield steps, len(lengths)
        clock, done = clock + steps * cost, done + steps
        lengths = [length for length in lengths if length > done]


def colocated(load: GenerationLoad, *, steps: int = 10) -> Simulated:
    """All ranks generate a step's groups, then all train on them. ``load.engines`` are on all ranks."""
    lengths, rng = SampledLengths(load), random.Random(load.seed + 1)
    count = round(load.groups_per_step / load.kept)
    mean = load.groups_per_step * load.samples_per_group * lengths.mean
    total = busy = trained = 0.0
    for step in range(steps):
        groups = range(step * count, (step + 1) * count)
        ends = [_seconds(load, [lengths[group] for group in own], rng) for own in _by_engine(load, groups)]
        tokens = sum(sum(lengths[group]) for group in groups) * load.kept
        train = load.train_seconds * tokens / mean * max(0.1, rng.gauss(1.0, load.jitter))
        total += max(ends) + train + load.sync_seconds + load.switch_seconds
        busy, trained = busy + sum(ends) / load.engines, trained + train
    idle = max(0.0, 1 - (busy + trained) / total)
    return Simulated(total / steps, idle_engines=idle, idle_trainers=idle)


def makespan(load: GenerationLoad) -> float:
    """Time of a step's groups on engines that start with them at once and get no others: the longest responses' end."""
    lengths, rng = SampledLengths(load), random.Random(0)
    exact, groups = replace(load, jitter=0.0), range(round(load.groups_per_step / load.kept))
    return max(_seconds(exact, [lengths[group] for group in own], rng) for own in _by_engine(load, groups))


def shortest_step(load: GenerationLoad, max_staleness: int) -> float:
    """Bound of the step time: engines with full slots, trainers, or one batch from its start to its weights, of which
    max_staleness + 1 overlap."""
    whole = makespan(load) + load.train_seconds + load.sync_seconds + load.switch_seconds
    return max(load.full_seconds, load.train_seconds, whole / (max_staleness + 1))


def _by_engine(load: GenerationLoad, groups: range) -> list[list[int]]:
    return [[group for group in groups if group % load.engines == engine] for engine in range(load.engines)]


def _seconds(load: GenerationLoad, groups: Sequence[Sequence[int]], rng: random.Random) -> float:
    """Time of an engine for these groups alone."""
    engine, seconds = ModelEngine(load.slots), 0.0
    for number, lengths in enumerate(groups):
        engine.admit(number, lengths)
    while engine.running:
        steps, requests = engine.until_end(), len(engine.running)
        jitter = max(0.1, rng.gauss(1.0, load.jitter / sqrt(steps)))
        seconds += steps * (load.step_seconds + load.sequence_seconds * requests) * jitter
        engine.advance(steps)
    return seconds
