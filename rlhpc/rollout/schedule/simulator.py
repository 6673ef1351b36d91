"""Step time and idle shares of a separate placement, with its own schedule and with arrival order, by simulation.

The separate placement runs the engines' own ``EngineSchedule`` on the constants of its virtual time, while steps take
real times: the load's, with jitter. Times are in seconds.

    separate   what the engines do; constants may be wrong
    arrival    the same bound of staleness, but each engine switches as soon as new weights are there: not deterministic

``colocated`` is in ``generation_load.py``: a colocated run has other engines and another training time than a separate
one on as many GPUs, and so a load of its own. Trainers' ranks that generate while they would idle are not simulated.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import sqrt

from rlhpc.rollout.schedule.actions import Admit, AwaitNews, EngineStep, Switch
from rlhpc.rollout.schedule.batches import Batches
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule, News
from rlhpc.rollout.schedule.generation_load import GenerationLoad, ModelEngine, SampledLengths, Simulated
from rlhpc.rollout.schedule.terms import Costs, InFlight, Terms


class _Job(ABC):
    """Engines and trainers in real time. Subclasses decide when an engine starts groups and switches."""

    def __init__(self, load: GenerationLoad, max_staleness: int, steps: int, warm: int) -> None:
        self.load, self.steps, self.warm, self.most = load, steps, warm, max_staleness
        self.now, self.published, self.training = 0.0, 0, False
        self.trained = 0
        self.lengths, self.rng = SampledLengths(load), random.Random(load.seed + 1)
        self.engines = [ModelEngine(load.slots) for _ in range(load.engines)]
        self.version = [0] * load.engines
        self.started: dict[int, int] = {}  # group -> version of its first tokens
        self.terms = Terms(
            engines=load.engines,
            groups_per_step=load.groups_per_step,
            max_staleness=max_staleness,
            steps=steps + max_staleness + 2,  # the engines are never short of work
            slots=load.slots,
            costs=load.costs(),
            filtered=load.kept < 1,
        )
        self.batches = Batches(self.terms)
        self.busy = self.train_busy = 0.0
        self.marks: list[tuple[float, float, float]] = []
        self.staleness: list[int] = []
        self._events: list[tuple[float, int, str, int, tuple[int, int] | None]] = []
        self._count = 0
        self._mean_batch = load.groups_per_step * load.samples_per_group * self.lengths.mean

    def run(self) -> Simulated:
        for engine in range(self.load.engines):
            self.proceed(engine)
        while len(self.marks) < self.steps:
            self.now, _, kind, engine, step = heappop(self._events)
            if kind == "stepped" and step is not None:
                ended = self.engines[engine].advance(step[0])
                self.reported(engine, step, ended)
                for group in ended:
                    self.batches.judge(group, self.keeps(group))
                self._train()
                self.proceed(engine)
            elif kind == "switched":
                self.proceed(engine)
            elif kind == "trained":
                self.marks.append((self.now, self.busy, self.train_busy))
                self.training = False
                self.at(self.load.sync_seconds, "published")
                self._train()
            else:
                self.published += 1
                self.new_weights()
        return self._result()

    def keeps(self, group: int) -> bool:
        return self.load.kept >= 1 or random.Random(f"{self.load.seed} {group}").random() < self.load.kept

    def at(self, seconds: float, kind: str, engine: int = 0, step: tuple[int, int] | None = None) -> None:
        """Schedules an event."""
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, kind, engine, step))

    def admit(self, engine: int, group: int) -> None:
        self.engines[engine].admit(group, self.lengths[group])
        self.started[group] = self.version[engine]

    def step(self, engine: int, steps: int) -> None:
        """Lets an engine make so many steps, in none but the last of which a response ends."""
        requests = len(self.engines[engine].running)
        seconds = steps * (self.load.step_seconds + self.load.sequence_seconds * requests) * self.jitter(steps)
        self.busy += seconds
        self.at(seconds, "stepped", engine, (steps, requests))

    def jitter(self, steps: int = 1) -> float:
        return max(0.1, self.rng.gauss(1.0, self.load.jitter / sqrt(steps)))

    @abstractmethod
    def proceed(self, engine: int) -> None:
        """Lets an idle engine do what it may."""

    @abstractmethod
    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        """An engine has made steps."""

    @abstractmethod
    def new_weights(self) -> None:
        """A version is there."""

    def _train(self) -> None:
        if self.training or (batch := self.batches.close()) is None:
            return
        tokens = sum(sum(self.lengths[group]) for group in batch.kept)
        seconds = self.load.train_seconds * tokens / self._mean_batch * self.jitter()
        self.train_busy, self.training = self.train_busy + seconds, True
        self.staleness += [batch.number - self.started[group] for group in batch.kept]
        self.at(seconds, "trained")

    def _result(self) -> Simulated:
        begin, end = self.marks[self.warm - 1], self.marks[-1]
        seconds = end[0] - begin[0]
        return Simulated(
            seconds / (len(self.marks) - self.warm),
            idle_engines=max(0.0, 1 - (end[1] - begin[1]) / (seconds * self.load.engines)),
            idle_trainers=max(0.0, 1 - (end[2] - begin[2]) / seconds),
            staleness=sum(self.staleness) / len(self.staleness),
            max_staleness=max(self.staleness),
        )


class _Separate(_Job):
    """The engines' own schedules."""

    def __init__(self, load: GenerationLoad, terms: tuple[int, int, int], costs: Costs, in_flight: InFlight) -> None:
        super().__init__(load, *terms)
        self.terms = replace(self.terms, costs=costs, in_flight=in_flight)
        self._schedules = [EngineSchedule(self.terms, engine) for engine in range(load.engines)]
        self._waiting: set[int] = set()  # for news
        self._lacking: set[int] = set()  # weights
        self._posted: list[tuple[int, News | None]] = [(-1, None)] * load.engines
        self._reports = [0] * load.engines  # number of each engine's reports
        self._read = [[-1] * load.engines for _ in range(load.engines)]

    def proceed(self, engine: int) -> None:
        todo = [engine]
        while todo:
            one = todo.pop()
            self._proceed(one)
            if self._waiting and self._schedules[one].has_news:
                woken = [other for other in sorted(self._waiting) if other != one and self._learn(other, one)]
                self._waiting -= set(woken)
                todo += woken

    def _proceed(self, engine: int) -> None:
        schedule = self._schedules[engine]
        while True:
            match schedule.next():
                case Switch(version):
                    if version > self.published:
                        self._lacking.add(engine)
                        return
                    self._reports[engine] += 1
                    schedule.switched(version)
                    self.version[engine] = version
                    again = self._computed_again(engine)
                    self.busy += again
                    if seconds := self.load.switch_seconds + again:
                        self.at(seconds, "switched", engine)
                        return
                case Admit(group):
                    self._reports[engine] += 1
                    self.admit(engine, group)
                    schedule.admitted(group, self.load.samples_per_group)
                case EngineStep():
                    model = self.engines[engine]
                    cost = self.terms.costs.engine_step(len(model.running))
                    news = self.terms.costs.train // 4 // cost + 1  # as often as the others hear of it
                    self.step(engine, min(model.until_end(), schedule.steps_ahead(len(model.running)), news))
                    return
                case AwaitNews():
                    if not sum(self._learn(engine, other) for other in range(self.load.engines)):
                        self._waiting.add(engine)
                        return
                case _:
                    return

    def _computed_again(self, engine: int) -> float:
        """Seconds of an engine for the KV cache of its responses in flight after a switch."""
        if self.terms.in_flight != "recompute":
            return 0.0
        model = self.engines[engine]
        tokens = model.generated + self.load.prompt_tokens * len(model.running)
        return self.load.prefill_seconds * tokens

    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        self._reports[engine] += 1
        schedule, (steps, requests) = self._schedules[engine], step
        schedule.stepped(requests, left=self.engines[engine].requests, ended=ended, times=steps)
        if self.terms.filtered:
            for group in ended:
                schedule.judged(group, self.keeps(group))

    def new_weights(self) -> None:
        lacking, self._lacking = sorted(self._lacking), set()
        for engine in lacking:
            self.proceed(engine)

    def _learn(self, engine: int, other: int) -> bool:
        """Whether ``other`` has news for ``engine``, which it learns."""
        if engine == other:
            return False
        schedule, (reports, news) = self._schedules[other], self._posted[other]
        if news is None or reports != self._reports[other] or schedule.has_news:
            news = schedule.news()
            self._posted[other] = self._reports[other], news
        if self._read[engine][other] == news["number"]:
            return False
        self._read[engine][other] = news["number"]
        self._schedules[engine].learn(other, news)
        return True


class _Arrival(_Job):
    """Engines that switch as soon as new weights are there."""

    def __init__(self, load: GenerationLoad, terms: tuple[int, int, int]) -> None:
        super().__init__(load, *terms)
        self._next, self._idle = list(range(load.engines)), set(range(load.engines))
        self._dropped: list[int] = []

    def proceed(self, engine: int) -> None:
        self._idle.discard(engine)
        if self.version[engine] < self.published:
            self.version[engine] = self.published
            if self.load.switch_seconds:
                self.at(self.load.switch_seconds, "switched", engine)
                return
        model = self.engines[engine]
        while model.requests < self.load.slots and self._may_start(engine):
            self.admit(engine, self._next[engine])
            self._next[engine] += self.load.engines
        if not model.running:
            self._idle.add(engine)
            return
        cost = self.load.step_seconds + self.load.sequence_seconds * len(model.running)
        soon = max(1, int(0.05 * self.load.train_seconds / cost))
        self.step(engine, min(model.until_end(), soon))

    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        dropped = [group for group in ended if not self.keeps(group)]
        self._dropped += dropped
        if dropped:
            for other in sorted(self._idle):
                self.proceed(other)

    def new_weights(self) -> None:
        for engine in sorted(self._idle):
            self.proceed(engine)

    def _may_start(self, engine: int) -> bool:
        group = self._next[engine]
        before = sum(dropped < group for dropped in self._dropped) if self._dropped else 0
        return (group - before) // self.load.groups_per_step - self.most <= self.version[engine]


def separate(
    load: GenerationLoad,
    max_staleness: int,
    *,
    costs: Costs | None = None,
    in_flight: InFlight = "recompute",
    steps: int = 14,
    warm: int = 4,
) -> Simulated:
    """A separate placement with the deterministic schedule; ``costs``: its constants, the load's by default."""
    return _Separate(load, (max_staleness, steps, warm), costs or load.costs(), in_flight).run()


def arrival(load: GenerationLoad, max_staleness: int, *, steps: int = 14, warm: int = 4) -> Simulated:
    """The same with engines that take over weights as soon as they are there."""
    return _Arrival(load, (max_staleness, steps, warm)).run()
