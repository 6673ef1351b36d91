"""One engine's part of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from rlhpc.rollout.schedule.actions import (
    Action,
    Admit,
    Answer,
    AwaitNews,
    End,
    EngineStep,
    Lend,
    Switch,
    TakeBack,
)
from rlhpc.rollout.schedule.knowledge import EngineView, Knowledge, Time, first_too_early
from rlhpc.rollout.schedule.states import State, first_state
from rlhpc.rollout.schedule.terms import Terms

News = dict[str, Any]  # JSON


class EngineSchedule:
    """Decides what one engine does next.

    A loop calls ``next`` and does what it says, until ``End``::

        match schedule.next():
            case Switch(version): ...; schedule.switched(version)
            case Admit(group): ...; schedule.admitted(group, requests)
            case Answer(key): ...; schedule.answered(key, left=..., ended=...)
            case Lend(requests, nanoseconds): ...; schedule.lent(requests, left=...)
            case TakeBack(lender): ...; schedule.taken_back(lender, left=..., ended=..., calls=...)
            case EngineStep(): ...; schedule.stepped(requests, left=..., ended=..., calls=...)
            case AwaitNews(): post schedule.news(), read the others' news and learn() them, take verdicts

    and posts ``news()`` when ``has_news``, in place of the last. Real time decides only how long it waits: news may be
    late, or skipped for later ones, but those of a former attempt of the run must never be learned.
    """

    def __init__(self, terms: Terms, engine: int, state: Mapping[str, Any] | None = None) -> None:
        """``state``: what ``state()`` returned when this engine switched to the version that is resumed."""
        state = first_state() if state is None else state
        self._terms, self._engine = terms, engine
        self._lenders = terms.lenders_of(engine)
        self.version: int = state["version"]
        self.clock: int = state["clock"]
        self._requests: int = state["requests"]
        self._calls: list[tuple[int, int]] = [(due, key) for due, key in state["calls"]]  # (when due, key), in order
        self._lends = bool(self._lenders)  # requests, before anything else with this version
        self._lent: list[int] = []  # lenders that have some
        self._back: Time = inf  # when these return them
        first = state["first"]
        self._known = Knowledge(terms, self.version, state["due"], first)
        self._started = set(state["started"])  # own groups after the next one that have started
        self._group: int = first + (engine - first) % terms.engines if state["next"] is None else state["next"]
        # Nothing of the others is known, not even which groups they had ended before this version.
        unknown = EngineView(version=-1, clock=0, busy=False, call=inf, group=first, settled=self.version)
        self._views = [unknown] * terms.engines
        self._facts: list[tuple[int, int | bool]] = []  # a group's end, later its verdict
        self._forgotten = 0  # number of facts that all others know
        self._clear: Time = -1  # until when the next action is a step, unless a report changes that
        self._number = 0  # of news
        self._posted: tuple[int, int, tuple] = (-1, -1, ())
        self._action: Action | None = None
        self._learned = False  # something new since the last decision
        self._unjudged: set[int] = set()
        for group, end, keeps in state["ended"]:
            self._end(group, end)
            if keeps is not None:
                self.judged(group, keeps)
        self._known.settle()

    # --- decisions

    def next(self) -> Action:
        """Action to take now. The same again until it is reported or news arrive; moves only an idle engine's clock."""
        if self.clock < self._clear and self._requests:
            return EngineStep()
        if isinstance(self._action, AwaitNews) and not self._learned:
            return self._action
        self._learned = False
        action = self._decide()
        while action is None:  # the clock was moved
            action = self._decide()
        self._action = action
        return action

    def _decide(self) -> Action | None:
        terms, clock = self._terms, self.clock
        if self.version >= terms.steps:
            return End()
        if self._back <= clock:
            return TakeBack(self._lent[0])
        window = self._window() if self._lends else 0
        if self._lends and not window:
            return Lend(0, 0)
        due = self._known.due(self.version + 1)
        is_due = due is not None and due <= clock
        if is_due and not (terms.in_flight == "finish" and (self._requests or self._calls)):
            return Switch(self.version + 1)
        horizon = self._horizon() if due is None or terms.filtered else []
        switch: Time = inf if is_due else due if due is not None else self._known.earliest_due(horizon)
        if switch <= clock:
            return self._await()
        call = self._call
        if call <= clock:
            return Answer(self._calls[0][1])
        opening = unknown = inf  # when drops let the next group start: known ones, others at the earliest
        parts = 1 + len(self._lenders) if self._lends else 1
        if self._requests < terms.slots * parts and not is_due:
            drops = self._known.count_drops(clock)
            if self._group < first_too_early(terms, drops, self.version, self._known.first(self.version)):
                return Admit(self._group)
            if terms.filtered:
                opening = self._known.opening(self._group, self.version)
                unknown = self._known.earliest_drop(horizon, self._group, self._engine)
                if unknown <= clock:
                    return self._await()
        if self._lends:
            each = min(self._requests // parts, terms.slots)
            return Lend(each, window if each else 0)
        if self._requests:
            self._clear = min(switch, call, opening, unknown)
            return EngineStep()
        return self._move(switch, due is not None, min(call, opening), unknown)

    def _move(self, switch: Time, known: bool, event: Time, unknown: Time) -> Action | None:  # noqa: FBT001
        """Moves the clock of an engine without requests to the next event, if it is certain."""
        if known:
            event = min(event, switch)
        elif switch <= event:
            return self._await()
        if unknown < event:
            return self._await()
        assert event < inf
        self.clock = int(event)
        return None

    def _window(self) -> int:
        """Virtual time for which lenders may have requests; 0 if it is less than the others rely on."""
        due = self._known.due(self.version)
        assert due is not None
        left = due + self._terms.lend - self.clock
        return left if left >= self._terms.costs.engine_step(1) else 0

    @property
    def _call(self) -> Time:
        """Time at which requests come back: from tools or from lenders."""
        return min(self._calls[0][0] if self._calls else inf, self._back)

    @property
    def calls(self) -> list[int]:
        """Keys of the tool calls in progress."""
        return [key for _, key in self._calls]

    def _await(self) -> AwaitNews:
        return AwaitNews(tuple(sorted(self._unjudged)))

    def _horizon(self) -> list[Time]:
        self._views[self._engine] = self._view()
        return self._known.horizon(self._views)

    def _view(self) -> EngineView:
        busy = self._requests > 0
        return EngineView(self.version, self.clock, busy, self._call, self._group, self._known.settled)

    def steps_ahead(self, requests: int) -> int:
        """Number of steps of ``requests`` requests that follow one another for certain, if ``next`` has just said to
        step and no request ends."""
        cost = self._terms.costs.engine_step(requests)
        return 1 << 62 if self._clear == inf else max(1, -int((self.clock - self._clear) // cost))

    # --- reports

    def admitted(self, group: int, requests: int) -> None:
        """Reports the start of a group with its number of requests to the engine."""
        assert group == self._group, f"group {group} started, not {self._group}"
        self._group += self._terms.engines
        while self._group in self._started:
            self._started.remove(self._group)
            self._group += self._terms.engines
        self._requests += requests
        self._clear = -1

    def stepped(
        self, requests: int, *, left: int, ended: Sequence[int] = (), calls: Sequence[int] = (), times: int = 1
    ) -> None:
        """Reports a step of ``requests`` requests, of none as of one: the others rely on the time of a shortest step.
        ``left``: requests in the engine after it, running and waiting;
        ``ended``: groups whose last response has ended; ``calls``: keys of the responses that now wait for tools.
        ``times``: the number of such steps, in the last of which this has happened; see ``steps_ahead``."""
        self.clock += times * self._terms.costs.engine_step(max(1, requests))
        if ended or calls or left < self._terms.slots <= self._requests:
            self._clear = -1
        self._requests = left
        due = self.clock + self._terms.costs.tool
        self._calls += [(due, key) for key in calls]
        self._end_all(ended)

    def answered(self, key: int, *, left: int, ended: Sequence[int] = ()) -> None:
        """Reports that a tool's answer was taken. ``left``: requests in the engine now; ``ended``: the group, if the
        answer has ended its last response."""
        _, expected = self._calls.pop(0)
        assert key == expected, f"answer of call {key}, not {expected}"
        self._requests, self._clear = left, -1
        self._end_all(ended)

    def lent(self, requests: int, *, left: int) -> None:
        """Reports that each lender has got so many requests. ``left``: requests in the engine now."""
        self._lends, self._requests, self._clear = False, left, -1
        if requests:
            self._lent, self._back = [*self._lenders], self.clock + self._window()

    def taken_back(self, lender: int, *, left: int, ended: Sequence[int] = (), calls: Sequence[int] = ()) -> None:
        """Reports that a lender has returned its requests. ``left``: requests in the engine now; ``ended``: groups
        whose last response has ended; ``calls``: keys of the responses that now wait for tools."""
        expected = self._lent.pop(0)
        assert lender == expected, f"requests of lender {lender}, not {expected}"
        if not self._lent:
            self._back = inf
        self._requests, self._clear = left, -1
        due = self.clock + self._terms.costs.tool
        self._calls += [(due, key) for key in calls]
        self._end_all(ended)

    def switched(self, version: int) -> None:
        """Reports that the engine has the weights of ``version``."""
        assert version == self.version + 1, f"version {version} after {self.version}"
        assert not self._lent, "lenders have requests of the version before"
        self.version, self._clear = version, -1
        self._lends = bool(self._lenders)
        self._known.forget(version)

    def judged(self, group: int, keeps: bool) -> None:  # noqa: FBT001
        """Reports whether the filter keeps an ended group of this engine. Not needed without a filter."""
        if group not in self._unjudged:
            return
        self._unjudged.remove(group)
        self._learned = True
        self._facts.append((group, keeps))
        self._known.judge(group, keeps=keeps)
        self._known.settle()

    def _end_all(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._end(group, self.clock)
        if groups:
            self._known.settle()

    def _end(self, group: int, clock: int) -> None:
        self._facts.append((group, clock))
        if self._terms.filtered:
            self._unjudged.add(group)
        self._known.end(group, clock)

    # --- between engines

    def learn(self, engine: int, news: News) -> None:
        """Takes the news of another engine; older ones than before and its own are ignored."""
        before = self._views[engine]
        if engine == self._engine or news["number"] <= before.number:
            return
        read, self._learned = news["forgotten"] + len(news["facts"]), True
        assert before.read >= news["forgotten"], f"engine {engine} forgot what engine {self._engine} needs"
        for group, fact in news["facts"][before.read - news["forgotten"] :]:
            if isinstance(fact, bool):
                self._known.judge(group, keeps=fact)
            else:
                self._known.end(group, fact)
        if read > before.read:
            self._known.settle()
        call = inf if news["call"] is None else news["call"]
        self._views[engine] = EngineView(
            news["version"], news["clock"], news["busy"], call, news["next"], news["settled"], read, news["number"]
        )

    @property
    def has_news(self) -> bool:
        """True if others may wait for what has changed since the last ``news()``."""
        clock, facts, present = self._posted
        if facts != self._forgotten + len(self._facts) or self.clock - clock > self._terms.costs.train // 4:
            return True
        return not isinstance(self._action, EngineStep | Admit) and present != self._present()

    def news(self) -> News:
        """State for the other engines: JSON, bounded by the groups of about ``max_staleness`` + 2 batches."""
        self._forget()
        self._posted = (self.clock, self._forgotten + len(self._facts), self._present())
        self._number += 1
        return {
            "number": self._number,
            "version": self.version,
            "clock": self.clock,
            "busy": self._requests > 0,
            "call": self._call if self._call < inf else None,
            "next": self._group,
            "settled": self._known.settled,
            "forgotten": self._forgotten,
            "facts": self._facts[:],
        }

    def _present(self) -> tuple:
        return self.version, self.clock, self._requests > 0, self._call, self._group

    def _forget(self) -> None:
        """Forgets facts about batches that all engines have settled."""
        others = [engine.settled for place, engine in enumerate(self._views) if place != self._engine]
        if min(others, default=self.version) < self.version:
            return
        first, count = self._known.first(self.version), 0
        while count < len(self._facts) and self._facts[count][0] < first:
            count += 1
        del self._facts[:count]
        self._forgotten += count

    # --- checkpoints

    def state(self) -> State:
        """JSON from which the engine continues identically, taken after ``switched(version)`` and before anything
        else, if all engines are restored from theirs of that version. Verdicts that are missing then are reported
        again, see ``unjudged``; tool calls in progress are called again."""
        first, engines = self.first_needed, self._terms.engines
        verdicts = {group: fact for group, fact in self._facts if isinstance(fact, bool)}
        ends = self._known.ends.items()
        own = sorted((group, end) for group, end in ends if group % engines == self._engine and group >= first)
        return {
            "version": self.version,
            "clock": self.clock,
            "due": self._known.due(self.version),
            "first": first,
            "next": self._group,
            "started": sorted(self._started),
            "requests": self._requests,
            "calls": self._calls[:],
            "ended": [(group, end, verdicts.get(group)) for group, end in own],
        }

    @property
    def unjudged(self) -> tuple[int, ...]:
        """Ended groups of this engine whose verdicts have not been reported."""
        return tuple(sorted(self._unjudged))

    def batch_of(self, group: int) -> int | None:
        """The step that trains on a group or drops it, as far as it is known and not forgotten; a group of a step
        before ``version`` may be forgotten. None: not known yet."""
        return self._known.batch_of(group)

    @property
    def first_needed(self) -> int:
        """First group of the step that trains with ``version``: a state at this version needs the ended groups from it
        on, and no earlier ones."""
        return self._known.first(self.version)
