"""Engines in virtual time: a model of one, the rule applied centrally, and the same by engines that know only news."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from rlhpc.rollout.schedule.actions import Admit, Answer, AwaitNews, End, EngineStep, Switch
from rlhpc.rollout.schedule.batches import Batches
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.states import first_state
from rlhpc.rollout.schedule.terms import Costs, Terms

Log = list[tuple]


def terms_by(rng: random.Random) -> Terms:
    """Random terms, small enough for hundreds of runs a second."""
    size = rng.randint(1, 6)
    filtered = rng.random() < 0.5
    costs = Costs(
        step=rng.choice([0, 1, 7, 50]), sequence=rng.choice([1, 3]), train=rng.choice([1, 5, 60, 300, 2000]),
        tool=rng.choice([0, 1, 20, 400]),
    )  # fmt: skip
    return Terms(
        engines=rng.randint(1, 8),
        groups_per_step=size,
        max_staleness=rng.randint(0, 4),
        steps=rng.randint(1, 7),
        slots=rng.randint(1, 6),
        costs=costs,
        in_flight=rng.choice(["recompute", "keep", "finish"]),
        filtered=filtered,
        batch_limit=rng.choice([0, size, 3 * size]) if filtered else 0,
    )


@dataclass
class Work:
    """Responses of each group, as tokens of each turn, and verdicts. Determined by the seed."""

    seed: int
    responses: int = 2
    tools: float = 0.0
    drops: float = 0.0
    log: float = 1.0

    def __post_init__(self) -> None:
        self.turns, self.keeps = cache(self._turns), cache(self._keeps)

    def _turns(self, group: int) -> list[list[int]]:
        rng = random.Random(f"{self.seed} {group}")
        found = []
        for _ in range(self.responses):
            turns = [self._length(rng)]
            while rng.random() < self.tools:
                turns.append(0 if rng.random() < 0.2 else self._length(rng))  # 0: no room after the answer
            found.append(turns)
        return found

    def _keeps(self, group: int) -> bool:
        return random.Random(f"{self.seed} {group} verdict").random() >= self.drops

    def _length(self, rng: random.Random) -> int:
        return 1 + min(60, int(rng.lognormvariate(1.0, self.log)))


@dataclass
class FakeEngine:
    """Requests of an engine, the first ``slots`` of which run; each a group and its turns."""

    slots: int
    requests: list[tuple[int, list[int]]] = field(default_factory=list)
    calling: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)  # responses of each group that have not ended
    keys: int = 0

    def admit(self, group: int, turns: list[list[int]]) -> None:
        self.left[group] = len(turns)
        self.requests += [(group, list(response)) for response in turns]

    def step(self) -> tuple[int, list[int], list[int]]:
        """(sequences, ended groups, calls)"""
        running, ended, calls = self.requests[: self.slots], [], []
        for request in running:
            group, turns = request
            turns[0] -= 1
            if not turns[0]:
                self.requests.remove(request)
                ended += self._end_turn(group, turns, calls)
        return len(running), ended, calls

    def answer(self, key: int) -> list[int]:
        group, turns = self.calling.pop(key)
        if turns[0] == 0:
            return self._end(group)
        self.requests.append((group, turns))
        return []

    def _end_turn(self, group: int, turns: list[int], calls: list[int]) -> list[int]:
        del turns[0]
        if not turns:
            return self._end(group)
        self.keys += 1
        self.calling[self.keys] = (group, turns)
        calls.append(self.keys)
        return []

    def _end(self, group: int) -> list[int]:
        self.left[group] -= 1
        return [] if self.left[group] else [group]


def plain(terms: Terms, work: Work) -> tuple[list[Log], list]:
    """The rule with everything known: the engine whose next action is the earliest acts. Returns each engine's log and
    the batches."""
    costs, engines = terms.costs, [FakeEngine(terms.slots) for _ in range(terms.engines)]
    logs: list[Log] = [[] for _ in engines]
    clock, version = [0] * terms.engines, [0] * terms.engines
    group, calls = list(range(terms.engines)), [[] for _ in engines]
    due, firsts, ends = [0], [0], {}
    batches, closed = Batches(terms), []

    def end(engine: int, ended: list[int]) -> None:
        for one in ended:
            ends[one] = clock[engine]
            batches.judge(one, work.keeps(one) or not terms.filtered)
        while len(due) <= terms.steps and (batch := batches.close()) is not None:
            last = max(ends[one] for one in range(batch.first, batch.end))
            closed.append(batch)
            due.append(max(due[-1], last) + costs.train)
            firsts.append(batch.end)

    def latest_step(one: int, engine: int, when: float) -> int:
        """Of a group, as it is known at a time: what is not known to be dropped counts as kept."""
        step, kept, seen = version[engine], 0, 0
        for former in range(firsts[step], one):
            dropped = former in ends and not work.keeps(former) and terms.filtered
            kept += not (dropped and ends[former] + costs.train <= when)
            seen += 1
            if kept == terms.groups_per_step or seen == terms.batch_limit:
                step, kept, seen = step + 1, 0, 0
        return step

    def opens(engine: int, when: float) -> bool:
        last = min(version[engine] + terms.max_staleness, terms.steps - 1)
        return latest_step(group[engine], engine, when) <= last

    def waits(engine: int) -> bool:
        """Whether it takes on no more until it has switched."""
        next_due = due[version[engine] + 1] if version[engine] + 1 < len(due) else inf
        return terms.in_flight == "finish" and next_due <= clock[engine]

    def when(engine: int) -> float:
        if version[engine] == terms.steps:
            return inf
        if engines[engine].requests:
            return clock[engine]
        times = [call for call, _ in calls[engine][:1]]
        if version[engine] + 1 < len(due):
            times.append(due[version[engine] + 1])
        if waits(engine):
            return max(clock[engine], *times[:1]) if calls[engine] else clock[engine]
        moments = [clock[engine], *(ends[one] + costs.train for one in ends if one < group[engine])]
        times += [moment for moment in sorted(moments) if moment >= clock[engine] and opens(engine, moment)][:1]
        return max(clock[engine], min(times, default=inf))

    def act(engine: int) -> None:
        log, model, now = logs[engine], engines[engine], clock[engine]
        next_due = due[version[engine] + 1] if version[engine] + 1 < len(due) else inf
        idle = not model.requests and not calls[engine]
        if next_due <= now and (idle or not waits(engine)):
            version[engine] += 1
            log.append((now, "switch", version[engine]))
        elif calls[engine] and calls[engine][0][0] <= now:
            key = calls[engine].pop(0)[1]
            log.append((now, "answer", key))
            end(engine, model.answer(key))
        elif len(model.requests) < terms.slots and not waits(engine) and opens(engine, now):
            log.append((now, "admit", group[engine]))
            model.admit(group[engine], work.turns(group[engine]))
            group[engine] += terms.engines
        elif model.requests:
            requests, ended, called = model.step()
            log.append((now, "step", requests))
            clock[engine] += costs.engine_step(requests)
            calls[engine] += [(clock[engine] + costs.tool, key) for key in called]
            end(engine, ended)

    while True:
        times = [when(engine) for engine in range(terms.engines)]
        engine = times.index(min(times))
        if times[engine] == inf:
            assert version == [terms.steps] * terms.engines, f"nothing to do at versions {version}"
            return logs, closed
        clock[engine] = int(times[engine])
        act(engine)


class Job:
    """The same by ``EngineSchedule``, in random order, with late news, late verdicts, late weights and restarts.

    Only what is posted goes from one engine to another, as JSON. ``kills``: how often all are killed.
    """

    def __init__(
        self, terms: Terms, work: Work, seed: int, kills: int = 0, states: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self.terms, self.work, self.rng, self.kills = terms, work, random.Random(f"job {seed}"), kills
        self.logs: list[Log] = [[] for _ in range(terms.engines)]
        self.saved: dict[int, dict[int, Any]] = {}  # version -> engine -> (state, model, log)
        self.models = [FakeEngine(terms.slots) for _ in range(terms.engines)]
        self.restarts = 0
        states = states or [first_state()] * terms.engines
        version, first = states[0]["version"], states[0]["first"]
        schedules = [EngineSchedule(terms, engine, state) for engine, state in enumerate(states)]
        self._begin(schedules, Batches(terms, version, first), version)

    def _begin(self, schedules: list[EngineSchedule], batches: Batches, published: int) -> None:
        self.schedules, self.batches, self.published = schedules, batches, published
        self.board: list[list[dict]] = [[] for _ in schedules]
        self.verdicts = [{group: self.rng.random() for group in schedule.unjudged} for schedule in schedules]
        self.speed = [self.rng.random() ** 2 + 0.01 for _ in schedules]
        self.delay = self.rng.choice([0.0, 0.5, 0.8])
        self.ended = [False] * len(schedules)
        self.closed: list = []
        for schedule in schedules:  # delivered again
            for group, _, keeps in schedule.state()["ended"]:
                if keeps is not None or not self.terms.filtered:
                    batches.judge(group, self.work.keeps(group) or not self.terms.filtered)

    def run(self) -> list[Log]:
        idle = 0
        while not all(self.ended):
            before = [len(log) for log in self.logs], [len(posts) for posts in self.board], self.published
            for _ in range(8):
                self._act(self.rng.choices(range(len(self.schedules)), self.speed)[0])
            self._train()
            after = [len(log) for log in self.logs], [len(posts) for posts in self.board], self.published
            idle = 0 if after != before else idle + 1
            assert idle < 3000, f"deadlock: {self.terms}"
            if self.restarts < self.kills and self.rng.random() < 0.02:
                self._kill()
        return self.logs

    def _act(self, engine: int) -> None:
        schedule, model, log = self.schedules[engine], self.models[engine], self.logs[engine]
        for group in list(self.verdicts[engine]):
            if self.rng.random() > self.delay:
                del self.verdicts[engine][group]
                schedule.judged(group, self.work.keeps(group))
                self.batches.judge(group, self.work.keeps(group))
        if schedule.has_news and self.rng.random() > self.delay:
            self.board[engine].append(json.loads(json.dumps(schedule.news())))
        action = schedule.next()
        assert schedule.next() == action
        clock = schedule.clock
        match action:
            case Switch(version):
                if version <= self.published:
                    log.append((clock, "switch", version))
                    schedule.switched(version)
                    self._save(engine)
            case Admit(group):
                log.append((clock, "admit", group))
                model.admit(group, self.work.turns(group))
                schedule.admitted(group, self.work.responses)
            case Answer(key):
                log.append((clock, "answer", key))
                ended = model.answer(key)
                schedule.answered(key, left=len(model.requests), ended=ended)
                self._end(engine, ended)
            case EngineStep():
                requests, ended, calls = model.step()
                log.append((clock, "step", requests))
                schedule.stepped(requests, left=len(model.requests), ended=ended, calls=calls)
                self._end(engine, ended)
            case AwaitNews():
                self._read(engine)
            case End():
                self.ended[engine] = True
        if self.rng.random() < 0.1:
            self._read(engine)

    def _read(self, engine: int) -> None:
        for other, posts in enumerate(self.board):
            if posts:
                back = self.rng.randint(1, min(3, len(posts))) if self.rng.random() < self.delay else 1
                self.schedules[engine].learn(other, posts[-back])

    def _end(self, engine: int, ended: list[int]) -> None:
        for group in ended:
            if self.terms.filtered:
                self.verdicts[engine][group] = self.rng.random()
            else:
                self.batches.judge(group)

    def _train(self) -> None:
        if self.rng.random() < self.delay or self.published == self.terms.steps:
            return
        batch = self.batches.close()
        if batch is not None:
            self.closed.append(batch)
            assert batch.number == self.published
            self.published += 1

    def _save(self, engine: int) -> None:
        schedule = self.schedules[engine]
        saved = json.dumps(schedule.state()), copy.deepcopy(self.models[engine]), list(self.logs[engine])
        self.saved.setdefault(schedule.version, {})[engine] = saved

    def _kill(self) -> None:
        """All end, and start again with the newest version that every engine has saved."""
        whole = [version for version, saved in self.saved.items() if len(saved) == self.terms.engines]
        if not whole:
            return
        self.restarts += 1
        version = self.rng.choice(whole[-2:])
        states = [json.loads(self.saved[version][engine][0]) for engine in range(self.terms.engines)]
        self.models = [copy.deepcopy(self.saved[version][engine][1]) for engine in range(self.terms.engines)]
        self.logs = [list(self.saved[version][engine][2]) for engine in range(self.terms.engines)]
        schedules = [EngineSchedule(self.terms, engine, state) for engine, state in enumerate(states)]
        self.saved = {known: saved for known, saved in self.saved.items() if known <= version}
        self._begin(schedules, Batches(self.terms, version, states[0]["first"]), version)


def check_rule(terms: Terms, work: Work, logs: list[Log], batches: list) -> int:
    """Each group starts once, in order, on its engine, and none is trained on with more than the maximum staleness.
    Returns the largest staleness."""
    started: dict[int, int] = {}
    for engine, log in enumerate(logs):
        version, groups = 0, []
        for _, kind, value in log:
            if kind == "switch":
                assert value == version + 1
                version = value
            elif kind == "admit":
                groups.append(value)
                assert value not in started
                started[value] = version
        assert version == terms.steps
        assert groups == list(range(engine, engine + terms.engines * len(groups), terms.engines))
    assert len(batches) == terms.steps
    needed = {group for batch in batches for group in range(batch.first, batch.end)}
    assert set(started) >= needed
    if not terms.filtered:
        assert set(started) == needed
    found = [batch.number - started[group] for batch in batches for group in (*batch.kept, *batch.dropped)]
    assert max(found) <= terms.max_staleness
    assert min(found) >= 0
    return max(found)
