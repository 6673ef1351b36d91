"""Step time and idle shares of a separate placement, with its own schedule and with arrival order, by simulation.

The separate placement runs the engines' own ``EngineSchedule`` on the constants of its virtual time, while steps take
real times: the load's, with jitter. Times are in seconds.

    separate   what the engines do; constants may be wrong
    arrival    the same bound of staleness, but each engine switches as soon as new weights are there: not deterministic

``colocated`` is in ``generation_load.py``: a colocated run has other engines and another training time than a separate
one on as many GPUs, and so a load of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from rlhpc.rollout.schedule.actions import Admit, AwaitNews, EngineStep, Lend, Switch, TakeBack
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule, News
from rlhpc.rollout.schedule.generation_load import Bundle, GenerationLoad, Simulated, lent_steps
from rlhpc.rollout.schedule.simulated_job import SimulatedJob
from rlhpc.rollout.schedule.terms import NANOSECONDS, Costs, InFlight

_LENT_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the time that trainers would wait
_WORTHWHILE = 0.02  # share of a step that trainers must wait
_AS_SHORT = 1.02  # times the shortest step


class _Separate(SimulatedJob):
    """The engines' own schedules."""

    def __init__(self, load: GenerationLoad, terms: tuple[int, int, int], costs: Costs, in_flight: InFlight) -> None:
        super().__init__(load, *terms)
        lenders = load.lenders if costs.lend else 0
        self.terms = replace(self.terms, costs=costs, in_flight=in_flight, lenders=lenders)
        self._schedules = [EngineSchedule(self.terms, engine) for engine in range(load.engines)]
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
            self._generating[lender] = [(max(0, length - done), group) for length, group in bundle]
        self.train_busy += seconds / self.terms.lenders
        self.at(seconds, "lender", lender)

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


class _Arrival(SimulatedJob):
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

    def trainers_free(self) -> None:
        """They wait."""

    def lender_event(self, number: int) -> None:
        """There are none."""

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
    """A separate placement with the deterministic schedule; ``costs``: its constants, the load's by default. The load's
    lenders generate if these give them time."""
    job = _Separate(load, (max_staleness, steps, warm), costs or load.costs(), in_flight)
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


def arrival(load: GenerationLoad, max_staleness: int, *, steps: int = 14, warm: int = 4) -> Simulated:
    """The same with engines that take over weights as soon as they are there."""
    return _Arrival(load, (max_staleness, steps, warm)).run()
