"""Engines and trainers of a simulated job in real time. Times are in seconds."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush
from math import sqrt

from rlhpc.rollout.schedule.arrival_batches import ArrivalBatches
from rlhpc.rollout.schedule.batches import Batches
from rlhpc.rollout.schedule.generation_load import GenerationLoad, ModelEngine, SampledLengths, Simulated
from rlhpc.rollout.schedule.terms import Terms


class SimulatedJob(ABC):
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
        self.batches: Batches | ArrivalBatches = Batches(self.terms)
        self.busy = self.train_busy = 0.0
        self.marks: list[tuple[float, float, float]] = []
        self.staleness: list[int] = []
        self._events: list[tuple[float, int, str, int, tuple[int, int] | None]] = []
        self._count = 0
        self._void = [-1] * load.engines  # number of the newest event that an engine's loss has made void
        self._mean_batch = load.groups_per_step * load.samples_per_group * self.lengths.mean

    def begin(self) -> None:
        """Lets the engines begin."""
        for engine in range(self.load.engines):
            self.proceed(engine)

    def run(self) -> Simulated:
        self.begin()
        while len(self.marks) < self.steps:
            self.now, number, kind, engine, step = heappop(self._events)
            if kind in ("stepped", "switched") and number <= self._void[engine]:
                continue
            if kind == "stepped" and step is not None:
                ended = self.engines[engine].advance(step[0])
                self.reported(engine, step, ended)
                self.end(ended)
                self.proceed(engine)
            elif kind == "switched":
                self.proceed(engine)
            elif kind == "trained":
                self.marks.append((self.now, self.busy, self.train_busy))
                self.training = False
                self.trained += 1
                self.at(self.load.sync_seconds, "published")
                self.trainers_free()
                self.train()
            elif kind == "lender":
                self.lender_event(engine)
            elif kind in ("lost", "back"):
                self.engine_event(kind, engine)
            else:
                self.published += 1
                self.new_weights()
        return self._result()

    def keeps(self, group: int) -> bool:
        return self.load.kept >= 1 or random.Random(f"{self.load.seed} {group}").random() < self.load.kept

    def end(self, groups: Sequence[int]) -> None:
        """Groups have ended."""
        for group in groups:
            self.batches.judge(group, self.keeps(group))
        self.train()

    def at(self, seconds: float, kind: str, engine: int = 0, step: tuple[int, int] | None = None) -> None:
        """Schedules an event."""
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, kind, engine, step))

    def stop(self, engine: int) -> None:
        """The engine loses its requests, and does not end what it does now."""
        self._void[engine] = self._count
        self.engines[engine] = ModelEngine(self.load.slots)

    def admit(self, engine: int, group: int) -> None:
        self.engines[engine].admit(group, self.lengths[group])
        self.started[group] = self.version[engine]

    def step(self, engine: int, steps: int, extra: float = 0.0) -> None:
        """Lets an engine make so many steps, in none but the last of which a response ends. ``extra``: seconds that
        the first takes besides."""
        requests = len(self.engines[engine].running)
        seconds = self.step_seconds(steps, requests) + extra
        self.busy += seconds
        self.at(seconds, "stepped", engine, (steps, requests))

    def step_seconds(self, steps: int, requests: int) -> float:
        """Real time of steps of so many requests."""
        return steps * (self.load.step_seconds + self.load.sequence_seconds * requests) * self.jitter(steps)

    def jitter(self, steps: int = 1) -> float:
        return max(0.1, self.rng.gauss(1.0, self.load.jitter / sqrt(steps)))

    def computed_again(self, engine: int) -> float:
        """Seconds of an engine for the KV cache of its responses in flight after a switch."""
        if self.terms.in_flight != "recompute":
            return 0.0
        model = self.engines[engine]
        tokens = model.generated + self.load.prompt_tokens * len(model.running)
        return self.load.prefill_seconds * tokens

    @abstractmethod
    def proceed(self, engine: int) -> None:
        """Lets an idle engine do what it may."""

    @abstractmethod
    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        """An engine has made steps."""

    @abstractmethod
    def new_weights(self) -> None:
        """A version is there."""

    @abstractmethod
    def trainers_free(self) -> None:
        """The trainers have trained a step, and wait for the next batch."""

    @abstractmethod
    def lender_event(self, number: int) -> None:
        """An event of the lenders."""

    def engine_event(self, kind: str, engine: int) -> None:
        """An engine is lost, or back: nothing that happens to other subclasses than those with losses."""
        raise AssertionError(f"{kind} {engine}")

    @property
    def may_train(self) -> bool:
        """True if the trainers' ranks do not generate."""
        return True

    def train(self) -> None:
        """Trains the next batch if it is there."""
        if self.training or not self.may_train or (batch := self.batches.close()) is None:
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
