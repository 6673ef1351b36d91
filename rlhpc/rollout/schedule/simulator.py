"""Step time and idle shares of a separate placement, with its own schedule and with arrival order, by simulation.

The separate placement runs the engines' own ``EngineSchedule`` on the constants of its virtual time, while steps take
real times: the load's, with jitter. Times are in seconds.

    separate   what the engines do; constants may be wrong
    arrival    the same bound of staleness, in the order of arrival

``colocated`` is in ``generation_load.py``: a colocated run has other engines and another training time than a separate
one on as many GPUs, and so a load of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rlhpc.rollout.schedule.actions import Admit, AwaitNews, EngineStep, Lend, Switch, TakeBack
from rlhpc.rollout.schedule.arrival import ArrivalSchedule
from rlhpc.rollout.schedule.arrival_batches import ArrivalBatches, TakenGroups
from rlhpc.rollout.schedule.engine_order import EngineOrder
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule, News
from rlhpc.rollout.schedule.generation_load import Bundle, GenerationLoad, Simulated, lent_steps
from rlhpc.rollout.schedule.simulated_job import SimulatedJob
from rlhpc.rollout.schedule.terms import NANOSECONDS, Costs, InFlight

_LENT_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the time that trainers would wait
_WORTHWHILE = 0.02  # share of a step that trainers must wait
_AS_SHORT = 1.02  # times the shortest step


class SeparateJob(SimulatedJob):
    """The engines' own schedules, and their own order of responses."""

    def __init__(self, load: GenerationLoad, terms: tuple[int, int, int], costs: Costs, in_flight: InFlight) -> None:
        super().__init__(load, *terms)
        lenders = load.lenders if costs.lend else 0
        self.terms = replace(self.terms, costs=costs, in_flight=in_flight, lenders=lenders)
        self._schedules = [EngineSchedule(self.terms, engine) for engine in range(load.engines)]
        self._orders = [
            EngineOrder(load.dealing, load.groups_per_step) if load.dealing != "equal" else None
            for _ in range(load.engines)
        ]
        self._mean_tokens = self.lengths.mean
        self._waiting: set[int] = set()  # for news
        self._lacking: set[int] = set()  # weights
        self._posted: list[tuple[int, News | None]] = [(-1, None)] * load.engines
        self._reports = [0] * load.engines  # number of each engine's reports
        self._read = [[-1] * load.engines for _ in range(load.engines)]
        self._lent: dict[int, tuple[Bundle, int]] = {}  # lender -> requests, virtual time
        self._generating: dict[int, Bundle] = {}  # as they will be returned
        self._returned: dict[int, Bundle] = {}
        self._awaited: dict[int, int] = {}  # lender -> engine that waits for it
        self._lenders_done, self._changed_over = 0, False

    def begin(self) -> None:
        self.trainers_free()
        for engine in range(self.load.engines):
            self._order(engine)
        super().begin()

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
                    self._order(engine)
                    again = self.computed_again(engine)
                    self.busy += again
                    if seconds := self.load.switch_seconds + again:
                        self.at(seconds, "switched", engine)
                        return
                case Admit(group):
                    self._reports[engine] += 1
                    self.admit(engine, group)
                    schedule.admitted(group, self.load.samples_per_group)
                case EngineStep():
                    self._step(engine)
                    return
                case Lend(each, window):
                    self._reports[engine] += 1
                    self._lend(engine, each, window)
                case TakeBack(lender):
                    if lender not in self._returned:
                        self._awaited[lender] = engine
                        return
                    self._reports[engine] += 1
                    self._take_back(engine, lender)
                case AwaitNews():
                    if not sum(self._learn(engine, other) for other in range(self.load.engines)):
                        self._waiting.add(engine)
                        return
                case _:
                    return

    def _step(self, engine: int) -> None:
        """Lets an engine make as many steps as follow one another for sure."""
        model, order = self.engines[engine], self._orders[engine]
        again = model.arrange(order) if order is not None else 0
        running = len(model.running)
        news = self.terms.costs.train // 4 // self.terms.costs.engine_step(running) + 1  # as the others hear of it
        steps = min(model.until_end(), self._schedules[engine].steps_ahead(running), news)
        if order is not None:
            if order.matters([request.group for request in model.waiting]):
                steps = min(steps, order.until_due or order.interval)
            order.stepped(steps)
        self.step(engine, steps, again * self.load.prefill_seconds)

    def _order(self, engine: int) -> None:
        """An engine has another version."""
        if (order := self._orders[engine]) is not None:
            order.switch(self._mean_tokens, self.lengths.ratios, self._schedules[engine].first_needed)

    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        self._reports[engine] += 1
        schedule, (steps, requests) = self._schedules[engine], step
        schedule.stepped(requests, left=self.engines[engine].requests, ended=ended, times=steps)
        self._judge(engine, ended)

    def _judge(self, engine: int, ended: Sequence[int]) -> None:
        if self.terms.filtered:
            for group in ended:
                self._schedules[engine].judged(group, self.keeps(group))

    def _lend(self, engine: int, each: int, window: int) -> None:
        schedule, model, lenders = self._schedules[engine], self.engines[engine], self.terms.lenders_of(engine)
        bundles = model.withdraw(each, len(lenders))
        schedule.lent(each, left=model.requests)
        for lender, bundle in zip(lenders, bundles, strict=True):
            self._lent[lender] = bundle, window
            self._generate(lender)

    def _take_back(self, engine: int, lender: int) -> None:
        model = self.engines[engine]
        ended = model.take_back(self._returned.pop(lender))
        self._schedules[engine].taken_back(lender, left=model.requests, ended=ended)
        self._judge(engine, ended)
        self.end(ended)

    def trainers_free(self) -> None:
        if self.terms.lenders:
            self._lenders_done, self._changed_over = 0, False
            self.at(self.load.lend_overhead_seconds, "lender", -1)

    @property
    def may_train(self) -> bool:
        return self._lenders_done == self.terms.lenders

    def lender_event(self, number: int) -> None:
        if number < 0:  # the trainers' ranks have the weights and can generate
            self._changed_over = True
            for lender in sorted(self._lent):
                self._generate(lender)
            return
        self._lenders_done += 1
        if number in self._generating:
            self._returned[number] = self._generating.pop(number)
        self.train()
        if number in self._awaited:
            self.proceed(self._awaited.pop(number))

    def _generate(self, lender: int) -> None:
        """Lets a lender generate until it has nothing to do or its time is over, if its ranks do not train."""
        if not self._changed_over:
            return
        (bundle, window), seconds, done = self._lent.pop(lender), 0.0, 0
        for steps, requests in lent_steps(self.terms.costs, bundle, window):
            seconds, done = seconds + self.step_seconds(steps, requests), done + steps
        if bundle:
            self._generating[lender] = [request.after(done) for request in bundle]
        self.train_busy += seconds / self.terms.lenders
        self.at(seconds, "lender", lender)

    def new_weights(self) -> None:
        lacking, self._lacking = sorted(self._lacking), set()
        for engine in lacking:
            self.proceed(engine)

    def _learn(self, engine: int, other: int) -> bool:
        """True if ``other`` has news for ``engine``, which it learns."""
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


@dataclass(frozen=True)
class Loss:
    """An engine is lost ``at`` a time, and back after so many ``seconds``."""

    engine: int
    at: float
    seconds: float


class _Arrival(SimulatedJob):
    """Engines in the order of arrival, with their own schedules."""

    def __init__(self, load: GenerationLoad, terms: tuple[int, int, int], losses: Sequence[Loss] = ()) -> None:
        super().__init__(load, *terms)
        self.terms = replace(self.terms, order="arrival")
        self.batches = self._batches = ArrivalBatches(self.terms, 0, TakenGroups())
        self._schedules = [ArrivalSchedule(self.terms, 0) for _ in range(load.engines)]
        self._pot, self._drawn, self._dropped = self._batches.open_pot(0, 0, 0), 0, 0
        self._idle: set[int] = set()
        self._absent: set[int] = set()
        self._lost: deque[int] = deque()  # groups of lost engines that no other has started
        for loss in losses:
            self.at(loss.at, "lost", loss.engine)
            self.at(loss.at + loss.seconds, "back", loss.engine)

    def proceed(self, engine: int) -> None:
        self._idle.discard(engine)
        schedule = self._schedules[engine]
        while True:
            if schedule.version < self.published:
                schedule.offer_version()
            if schedule.wants_group and (group := self._draw(schedule.version)) is not None:
                schedule.offer_group(group)
            match schedule.next():
                case Switch(version):
                    schedule.switched(version)
                    self.version[engine] = version
                    if seconds := self.load.switch_seconds + self.computed_again(engine):
                        self.at(seconds, "switched", engine)
                        return
                case Admit(group):
                    self.admit(engine, group)
                    schedule.admitted(group, self.load.samples_per_group)
                case EngineStep():
                    model = self.engines[engine]
                    cost = self.load.step_seconds + self.load.sequence_seconds * len(model.running)
                    soon = max(1, int(0.05 * self.load.train_seconds / cost))
                    self.step(engine, min(model.until_end(), soon))
                    return
                case _:
                    self._idle.add(engine)
                    return

    def reported(self, engine: int, step: tuple[int, int], ended: Sequence[int]) -> None:
        self._schedules[engine].stepped(step[1], left=self.engines[engine].requests, ended=ended)
        dropped = sum(not self.keeps(group) for group in ended)
        self._dropped += dropped
        if dropped:
            self._wake()

    def trainers_free(self) -> None:
        """The next pot opens before its version has arrived."""
        self._pot, self._drawn = self._batches.open_pot(self.trained, self._drawn, self._dropped), 0

    def new_weights(self) -> None:
        self._wake()

    def lender_event(self, number: int) -> None:
        """There are none."""

    def engine_event(self, kind: str, engine: int) -> None:
        if kind == "lost":
            self.stop(engine)
            self._idle.discard(engine)
            self._absent.add(engine)
            held = {group for model in self.engines for group in model.left}
            offered = {schedule.offered_group for schedule in self._schedules}
            held |= {group for group in offered - {self._schedules[engine].offered_group} if group is not None}
            self._lost += self._batches.lose(held, self._lost, self._drawn, self._dropped)
            self._wake()
        elif engine in self._absent:
            self._absent.remove(engine)
            self._schedules[engine] = ArrivalSchedule(self.terms, self.published)
            self.version[engine] = self.published
            self.proceed(engine)

    def _wake(self) -> None:
        for engine in sorted(self._idle - self._absent):
            self.proceed(engine)

    def _draw(self, version: int) -> int | None:
        if self._lost and version == self._pot.version:
            return self._lost.popleft()
        if version != self._pot.version or self._drawn >= self._pot.limit(self._dropped):
            return None
        self._drawn += 1
        return self._pot.group(self._drawn - 1)


def separate(
    load: GenerationLoad,
    max_staleness: int,
    *,
    costs: Costs | None = None,
    in_flight: InFlight = "recompute",
    steps: int = 14,
    warm: int = 4,
) -> Simulated:
    """A separate placement with the deterministic schedule; ``costs``: its constants, the load's by default. The load's
    lenders generate if these give them time."""
    job = SeparateJob(load, (max_staleness, steps, warm), costs or load.costs(), in_flight)
    return replace(job.run(), lend_seconds=job.terms.lend / NANOSECONDS)


def with_lending(load: GenerationLoad, max_staleness: int, *, steps: int = 14, warm: int = 4) -> Simulated:
    """A separate placement whose trainers' ranks generate while they would wait, for the best of a few times: the
    longest with which steps are about as short; 0 if none is better."""
    alone = separate(load, max_staleness, steps=steps, warm=warm)
    found, waits = [alone], alone.idle_trainers * alone.step_seconds
    if alone.idle_trainers < _WORTHWHILE:
        return alone
    for share in _LENT_SHARES:
        found.append(separate(load, max_staleness, costs=load.costs(lend=share * waits), steps=steps, warm=warm))
    most = min(alone.step_seconds, _AS_SHORT * min(one.step_seconds for one in found))
    return max((one for one in found if one.step_seconds <= most), key=attrgetter("lend_seconds"))


def arrival(
    load: GenerationLoad, max_staleness: int, *, losses: Sequence[Loss] = (), steps: int = 14, warm: int = 4
) -> Simulated:
    """The same in the order of arrival, with engines that are lost and come back."""
    return _Arrival(load, (max_staleness, steps, warm), losses).run()
