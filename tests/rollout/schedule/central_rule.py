"""The rule of the schedule, applied by someone who knows everything of all engines."""

from __future__ import annotations

from math import inf

from rlhpc.rollout.schedule.batches import Batches, ClosedBatch
from rlhpc.rollout.schedule.terms import Terms
from tests.rollout.schedule.worlds import FakeEngine, Log, Work, generate_lent


class _Engine:
    """What the rule has of one engine."""

    def __init__(self, terms: Terms, number: int) -> None:
        self.model, self.log = FakeEngine(terms.slots), []
        self.clock = self.version = 0
        self.group = number
        self.calls: list[tuple[int, int]] = []
        self.lenders = terms.lenders_of(number)
        self.lends = bool(self.lenders)
        self.lent: list[tuple[int, list]] = []  # lender, requests as they return
        self.back = inf


class Rule:
    """All engines, the due times of versions, and the ends of groups."""

    def __init__(self, terms: Terms, work: Work) -> None:
        self.terms, self.work = terms, work
        self.engines = [_Engine(terms, number) for number in range(terms.engines)]
        self.due, self.firsts, self.ends = [0], [0], {}
        self.batches, self.closed = Batches(terms), []

    def run(self) -> None:
        """Lets the engine whose next action is the earliest act, until all have the last version."""
        while True:
            times = [self.when(engine) for engine in self.engines]
            if min(times) == inf:
                found = {engine.version for engine in self.engines}
                assert found == {self.terms.steps}, f"nothing to do at versions {found}"
                return
            engine = self.engines[times.index(min(times))]
            engine.clock = int(min(times))
            self.act(engine)

    def end(self, engine: _Engine, ended: list[int]) -> None:
        terms = self.terms
        for one in ended:
            self.ends[one] = engine.clock
            self.batches.judge(one, self.work.keeps(one) or not terms.filtered)
        while len(self.due) <= terms.steps and (batch := self.batches.close()) is not None:
            last = max(self.ends[one] for one in batch.groups)
            self.closed.append(batch)
            lend = terms.costs.lend if terms.lenders else 0
            self.due.append(max(self.due[-1] + lend, last) + terms.costs.train)
            self.firsts.append(batch.end)

    def latest_step(self, engine: _Engine, when: float) -> int:
        """Of its next group, as it is known at a time: what is not known to be dropped counts as kept."""
        terms, step, kept, seen = self.terms, engine.version, 0, 0
        for former in range(self.firsts[step], engine.group):
            dropped = former in self.ends and not self.work.keeps(former) and terms.filtered
            kept += not (dropped and self.ends[former] + terms.costs.train <= when)
            seen += 1
            if kept == terms.groups_per_step or seen == terms.batch_limit:
                step, kept, seen = step + 1, 0, 0
        return step

    def opens(self, engine: _Engine, when: float) -> bool:
        last = min(engine.version + self.terms.max_staleness, self.terms.steps - 1)
        return self.latest_step(engine, when) <= last

    def next_due(self, engine: _Engine) -> float:
        return self.due[engine.version + 1] if engine.version + 1 < len(self.due) else inf

    def waits(self, engine: _Engine) -> bool:
        """Whether it takes on no more until it has switched."""
        return self.terms.in_flight == "finish" and self.next_due(engine) <= engine.clock

    def when(self, engine: _Engine) -> float:
        """When an engine acts next, as far as it is known."""
        clock = engine.clock
        if engine.version == self.terms.steps:
            return inf
        if engine.model.requests or engine.lends:
            return clock
        call = engine.calls[0][0] if engine.calls else inf
        if self.waits(engine):
            return max(clock, call) if engine.calls else clock
        moments = [
            clock, *(self.ends[one] + self.terms.costs.train for one in self.ends if one < engine.group)
        ]  # fmt: skip
        opening = next((when for when in sorted(moments) if when >= clock and self.opens(engine, when)), inf)
        return max(clock, min(call, engine.back, self.next_due(engine), opening))

    def act(self, engine: _Engine) -> None:
        log, model, now = engine.log, engine.model, engine.clock
        idle = not model.requests and not engine.calls
        window = self.due[engine.version] + self.terms.costs.lend - now
        slots = self.terms.slots * (1 + len(engine.lenders) if engine.lends else 1)
        if engine.back <= now:
            self.take_back(engine)
        elif engine.lends and window < self.terms.costs.engine_step(1):
            log.append((now, "lend", (0, 0)))
            engine.lends = False
        elif self.next_due(engine) <= now and (idle or not self.waits(engine)):
            assert not engine.lent
            engine.version += 1
            engine.lends = bool(engine.lenders)
            log.append((now, "switch", engine.version))
        elif engine.calls and engine.calls[0][0] <= now:
            key = engine.calls.pop(0)[1]
            log.append((now, "answer", key))
            self.end(engine, model.answer(key))
        elif len(model.requests) < slots and not self.waits(engine) and self.opens(engine, now):
            log.append((now, "admit", engine.group))
            model.admit(engine.group, self.work.turns(engine.group))
            engine.group += self.terms.engines
        elif engine.lends:
            self.lend(engine, window)
        elif model.requests:
            self.step(engine)

    def lend(self, engine: _Engine, window: int) -> None:
        engine.lends, lenders = False, len(engine.lenders)
        each = min(len(engine.model.requests) // (1 + lenders), self.terms.slots)
        engine.log.append((engine.clock, "lend", (each, window if each else 0)))
        if each:
            engine.back = engine.clock + window
            bundles = engine.model.withdraw(each, lenders)
            engine.lent = [
                (lender, generate_lent(self.terms.costs, bundle, window))
                for lender, bundle in zip(engine.lenders, bundles, strict=True)
            ]

    def take_back(self, engine: _Engine) -> None:
        lender, requests = engine.lent.pop(0)
        engine.log.append((engine.clock, "take back", lender))
        ended, called = engine.model.take_back(requests)
        engine.back = engine.back if engine.lent else inf
        engine.calls += [(engine.clock + self.terms.costs.tool, key) for key in called]
        self.end(engine, ended)

    def step(self, engine: _Engine) -> None:
        requests, ended, called = engine.model.step()
        engine.log.append((engine.clock, "step", requests))
        engine.clock += self.terms.costs.engine_step(requests)
        engine.calls += [(engine.clock + self.terms.costs.tool, key) for key in called]
        self.end(engine, ended)


def plain(terms: Terms, work: Work) -> tuple[list[Log], list[ClosedBatch]]:
    """Each engine's log, and the batches."""
    rule = Rule(terms, work)
    rule.run()
    return [engine.log for engine in rule.engines], rule.closed
