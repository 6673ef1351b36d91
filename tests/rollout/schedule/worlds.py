"""Engines in virtual time: a model of one, and a job of engines that know only each other's news."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlhpc.rollout.schedule.actions import Admit, Answer, AwaitNews, End, EngineStep, Lend, Switch, TakeBack
from rlhpc.rollout.schedule.batches import Batches
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.states import first_state
from rlhpc.rollout.schedule.terms import Costs, Terms

Log = list[tuple]
Request = tuple[int, list[int]]  # a group, tokens of each turn that is left


def terms_by(rng: random.Random, lenders: int = 0) -> Terms:
    """Random terms, small enough for hundreds of runs a second."""
    size = rng.randint(1, 6)
    filtered = rng.random() < 0.5
    costs = Costs(
        step=rng.choice([0, 1, 7, 50]), sequence=rng.choice([1, 3]), train=rng.choice([1, 5, 60, 300, 2000]),
        tool=rng.choice([0, 1, 20, 400]), lend=rng.choice([0, 2, 30, 200, 1500]) if lenders else 0,
    )  # fmt: skip
    return Terms(
        engines=rng.randint(1, 8),
        groups_per_step=size,
        max_staleness=rng.randint(0, 4),
        steps=rng.randint(1, 7),
        slots=rng.randint(1, 6),
        costs=costs,
        in_flight="recompute" if lenders else rng.choice(["recompute", "keep", "finish"]),
        filtered=filtered,
        lenders=lenders,
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
    requests: list[Request] = field(default_factory=list)
    calling: dict[int, Request] = field(default_factory=dict)
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

    def withdraw(self, each: int, bundles: int) -> list[list[Request]]:
        """Bundles of so many requests each, the last ones, in order."""
        first = len(self.requests) - each * bundles
        taken, self.requests = self.requests[first:], self.requests[:first]
        return [taken[place * each : (place + 1) * each] for place in range(bundles)]

    def take_back(self, requests: list[Request]) -> tuple[list[int], list[int]]:
        """(ended groups, calls) of those whose turn has ended; the others are continued."""
        ended, calls = [], []
        for group, turns in requests:
            if turns[0]:
                self.requests.append((group, turns))
            else:
                ended += self._end_turn(group, turns, calls)
        return ended, calls

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


def generate_lent(costs: Costs, bundle: list[Request], window: int) -> list[Request]:
    """What a lender returns."""
    clock, running = 0, list(bundle)
    while running and clock < window:
        clock += costs.engine_step(len(running))
        for _, turns in running:
            turns[0] -= 1
        running = [request for request in running if request[1][0]]
    return bundle


class Trainers:
    """When the job's trainers generate and train: step v once each lender has had its requests of version v."""

    def __init__(self, terms: Terms, published: int, rng: random.Random) -> None:
        self._terms, self._rng, self.published = terms, rng, published
        engines = {terms.engine_of(lender) for lender in range(terms.lenders)}
        self._lent = dict.fromkeys(engines, published - 1)  # newest version with which an engine has lent
        self._bundles: dict[int, tuple[list[Request], int]] = {}  # lender -> requests, time
        self._returned: dict[int, list[Request]] = {}

    def lend(self, engine: int, version: int, bundles: list[list[Request]], window: int) -> None:
        """Has requests from an engine for its lenders, or none."""
        assert version == self._lent[engine] + 1 == self.published, "once per version, before it is trained on"
        assert not self._bundles.keys() & {*self._terms.lenders_of(engine)}
        self._lent[engine] = version
        for lender, bundle in zip(self._terms.lenders_of(engine), bundles, strict=False):
            self._bundles[lender] = bundle, window

    def generate(self, delay: float) -> None:
        """Lets some lenders do their work."""
        for lender in list(self._bundles):
            if self._rng.random() > delay:
                self._returned[lender] = generate_lent(self._terms.costs, *self._bundles.pop(lender))

    def returned(self, lender: int) -> list[Request] | None:
        """What a lender returns, if it has."""
        return self._returned.pop(lender, None)

    @property
    def may_train(self) -> bool:
        """Whether all lenders have done their work of this step."""
        return not self._bundles and all(version == self.published for version in self._lent.values())


class Job:
    """The same by ``EngineSchedule``, in random order, with late news, late verdicts, late weights and restarts.

    Only what is posted goes from one engine to another, as JSON. ``kills``: how often all are killed.
    """

    schedule_type = EngineSchedule

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
        schedules = [self.schedule_type(terms, engine, state) for engine, state in enumerate(states)]
        self._begin(schedules, Batches(terms, version, first), version)

    def _begin(self, schedules: list[EngineSchedule], batches: Batches, published: int) -> None:
        self.schedules, self.batches = schedules, batches
        self.trainers = Trainers(self.terms, published, self.rng)
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
            before = self._progress()
            for _ in range(8):
                self._act(self.rng.choices(range(len(self.schedules)), self.speed)[0])
            self._train()
            idle = 0 if self._progress() != before else idle + 1
            assert idle < 3000, f"deadlock: {self.terms}"
            if self.restarts < self.kills and self.rng.random() < 0.02:
                self._kill()
        return self.logs

    def _progress(self) -> tuple:
        return [len(log) for log in self.logs], [len(posts) for posts in self.board], self.trainers.published

    def _act(self, engine: int) -> None:
        self._judge(engine)
        self._do(engine)
        if self.rng.random() < 0.1:
            self._read(engine)

    def _do(self, engine: int) -> None:
        schedule, model, log = self.schedules[engine], self.models[engine], self.logs[engine]
        if schedule.has_news and self.rng.random() > self.delay:
            self.board[engine].append(json.loads(json.dumps(schedule.news())))
        action = schedule.next()
        assert schedule.next() == action
        clock = schedule.clock
        match action:
            case Switch(version):
                if version <= self.trainers.published:
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
            case Lend() | TakeBack():
                self._lend(engine, action)
            case EngineStep():
                requests, ended, calls = model.step()
                log.append((clock, "step", requests))
                schedule.stepped(requests, left=len(model.requests), ended=ended, calls=calls)
                self._end(engine, ended)
            case AwaitNews():
                self._read(engine)
            case End():
                self.ended[engine] = True

    def _lend(self, engine: int, action: Lend | TakeBack) -> None:
        schedule, model, log = self.schedules[engine], self.models[engine], self.logs[engine]
        if isinstance(action, Lend):
            log.append((schedule.clock, "lend", (action.requests, action.nanoseconds)))
            bundles = model.withdraw(action.requests, len(self.terms.lenders_of(engine)))
            self.trainers.lend(engine, schedule.version, bundles if action.requests else [], action.nanoseconds)
            schedule.lent(action.requests, left=len(model.requests))
        elif (returned := self.trainers.returned(action.lender)) is not None:
            log.append((schedule.clock, "take back", action.lender))
            ended, calls = model.take_back(returned)
            schedule.taken_back(action.lender, left=len(model.requests), ended=ended, calls=calls)
            self._end(engine, ended)

    def _judge(self, engine: int) -> None:
        for group in list(self.verdicts[engine]):
            if self.rng.random() > self.delay:
                del self.verdicts[engine][group]
                self.schedules[engine].judged(group, self.work.keeps(group))
                self.batches.judge(group, self.work.keeps(group))

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
        self.trainers.generate(self.delay)
        if self.rng.random() < self.delay or self.trainers.published == self.terms.steps:
            return
        if not self.trainers.may_train:
            return
        batch = self.batches.close()
        if batch is not None:
            self.closed.append(batch)
            assert batch.number == self.trainers.published
            self.trainers.published += 1

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
        schedules = [self.schedule_type(self.terms, engine, state) for engine, state in enumerate(states)]
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
    needed = {group for batch in batches for group in batch.groups}
    assert set(started) >= needed
    if not terms.filtered:
        assert set(started) == needed
    found = [batch.number - started[group] for batch in batches for group in (*batch.kept, *batch.dropped)]
    assert max(found) <= terms.max_staleness
    assert min(found) >= 0
    return max(found)
