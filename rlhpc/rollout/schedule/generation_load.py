"""Load of a step: responses, engine time, and time of a colocated step. Times are in seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import log, sqrt
from operator import itemgetter
from typing import NamedTuple

from rlhpc.rollout.schedule.engine_order import EngineOrder
from rlhpc.rollout.schedule.response_order import Dealing, Unfinished
from rlhpc.rollout.schedule.terms import Costs


class ModelRequest(NamedTuple):
    """A request: steps until it ends, the place of its response and the tokens that this has."""

    left: int
    group: int
    number: int = 0
    tokens: int = 0

    def after(self, steps: int) -> ModelRequest:
        """The same after so many steps, or fewer if it has ended."""
        steps = min(steps, self.left)
        return self._replace(left=self.left - steps, tokens=self.tokens + steps)


Bundle = list[ModelRequest]


@dataclass(frozen=True)
class GenerationLoad:
    """Responses and samples of a step, and their times."""

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
    dealing: Dealing = "equal"  # order of responses that wait, with the deterministic schedule
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
    """Log-normal lengths of each group's responses, of which the longest are cut. Determined by the seed. ``ratios``:
    what earlier responses to a group's prompt had over the mean, where it is known."""

    def __init__(self, load: GenerationLoad) -> None:
        self._load, self._rng = load, random.Random(load.seed)
        self.ratios: dict[int, float] = {}
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
    running: list[tuple[int, int, ModelRequest]] = field(default_factory=list)  # heap of (last step, place, request)
    waiting: deque[ModelRequest] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)  # responses of each group that have not ended
    ended: list[tuple[int, int]] = field(default_factory=list)  # responses' groups and lengths, until a deal
    places: int = 0  # taken in the order in which requests run

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def admit(self, group: int, lengths: Sequence[int]) -> None:
        self.left[group] = len(lengths)
        self.waiting.extend(ModelRequest(length, group, index) for index, length in enumerate(lengths))
        self._fill()

    @property
    def generated(self) -> int:
        """Tokens so far of the running responses."""
        return sum(self._now(one).tokens for one in self.running)

    def until_end(self) -> int:
        """Steps until the next response ends."""
        return self.running[0][0] - self.steps

    def advance(self, steps: int) -> list[int]:
        """Makes steps in which all running requests go on. Returns the groups that have ended."""
        self.steps += steps
        ended = []
        while self.running and self.running[0][0] <= self.steps:
            ended += self._end(self._now(heappop(self.running)))
        self._fill()
        return ended

    def withdraw(self, each: int, lenders: int) -> list[Bundle]:
        """Takes the last requests away, so many for each lender."""
        count = each * lenders
        found = [self.waiting.pop() for _ in range(min(count, len(self.waiting)))][::-1]
        if len(found) < count:
            self.running.sort(key=itemgetter(1))
            first = len(self.running) - (count - len(found))
            found = [self._now(one) for one in self.running[first:]] + found
            del self.running[first:]
            heapify(self.running)
        return [found[place * each : (place + 1) * each] for place in range(lenders)]

    def take_back(self, bundle: Bundle) -> list[int]:
        """Has requests again, of which those that have 0 steps left have ended. Returns the groups that have ended."""
        ended = [group for request in bundle if not request.left for group in self._end(request)]
        self.waiting.extend(request for request in bundle if request.left)
        self._fill()
        return ended

    def arrange(self, order: EngineOrder) -> int:
        """Before a step: has those run that are next, if a deal is due and matters. Returns the tokens of those that
        let others run, whose keys and values are computed again."""
        order.note(self.ended)
        self.ended = []
        if not order.is_due([request.group for request in self.waiting]):
            return 0
        ran = {(one[2].group, one[2].number): one for one in self.running}
        every = {place: self._now(one) for place, one in ran.items()}
        every |= {(request.group, request.number): request for request in self.waiting}
        places = order.ordered([Unfinished(place, one.tokens, place in ran) for place, one in every.items()])
        self.running = [ran[place] for place in places[: self.slots] if place in ran]
        heapify(self.running)
        goes_on = {(one[2].group, one[2].number) for one in self.running}
        self.waiting = deque(every[place] for place in places if place not in goes_on)
        self._fill()
        return sum(every[place].tokens for place in ran.keys() - goes_on)

    def _now(self, one: tuple[int, int, ModelRequest]) -> ModelRequest:
        """A running request as it is now."""
        last, _, request = one
        return request.after(request.left - (last - self.steps))

    def _end(self, request: ModelRequest) -> list[int]:
        """A response has ended, and perhaps its group."""
        group = request.group
        self.ended.append((group, request.tokens))
        self.left[group] -= 1
        if self.left[group]:
            return []
        del self.left[group]
        return [group]

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            self.places += 1
            heappush(self.running, (self.steps + request.left, self.places, request))


def lent_steps(costs: Costs, bundle: Bundle, window: int) -> Iterator[tuple[int, int]]:
    """Yields how many steps of how many requests a lender makes, until the first that reaches the virtual time
    ``window`` or has no request left."""
    lengths, clock, done = sorted(request.left for request in bundle), 0, 0
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
