"""The first rank of an engine: decides what the engine does next, judges groups and delivers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlhpc.core.errors import PeerLost
from rlhpc.core.folder import RunFolder
from rlhpc.data.groups import make_filter, with_routed_experts, without_routed_experts
from rlhpc.parallel.board import Board
from rlhpc.rollout.collect import Collector, Draft, Scored, Stepped
from rlhpc.rollout.generator.arrivals import Arrivals, RollCalls
from rlhpc.rollout.generator.lending import LentRequests
from rlhpc.rollout.generator.messages import (
    Delivered,
    FinishedGroup,
    Held,
    Message,
    Published,
    Returned,
    StartPoint,
    Validated,
    Written,
    published_key,
    start_key,
)
from rlhpc.rollout.generator.meter import ActivityMeter
from rlhpc.rollout.generator.news import NewsExchange
from rlhpc.rollout.generator.parts import SHARE_SECONDS, GeneratorParts, Links
from rlhpc.rollout.generator.record import read_record
from rlhpc.rollout.generator.responses import drafted
from rlhpc.rollout.generator.shelf import HeldGroup, Shelf, call_key
from rlhpc.rollout.generator.state import EngineState, InFlightResponse
from rlhpc.rollout.schedule.actions import Action, Admit, AwaitNews, Switch, TakeBack
from rlhpc.rollout.schedule.acts import ActLog
from rlhpc.rollout.schedule.arrival import ArrivalSchedule, RealTimeSchedule, ReplayedSchedule
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.states import first_state
from rlhpc.rollout.schedule.terms import Terms

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.0005, 0.05  # between two looks at the board, by engine
_SHORTEST_LOOK_SECONDS = 0.001

T = TypeVar("T")


@dataclass(frozen=True)
class ScoreGroups:
    """Let the models beside the engine score groups. No action of a schedule: it takes no virtual time."""

    groups: Sequence[FinishedGroup]  # without routed experts


@dataclass(frozen=True)
class RankOrder:
    """Next action of all ranks of the engine. ``published``: the version to switch to; ``returned``: what a lender
    returns."""

    action: Action | ScoreGroups
    published: Published | None = None
    returned: Returned | None = None


@dataclass(frozen=True)
class Beginning:
    """Beginning of an attempt: its first version as published, and the state that the engine resumes from, if any."""

    start: StartPoint
    published: Published


class Lead:
    """Work of an engine's first rank beside its ranks' common work."""

    def __init__(
        self, parts: GeneratorParts, links: Links, terms: Terms, meter: ActivityMeter, lending: LentRequests
    ) -> None:
        assert links.board is not None, "the first rank of an engine has a board"
        assert links.channel is not None, "the first rank of an engine has a channel to the trainers"
        self._parts, self._terms, self._meter, self._lending = parts, terms, meter, lending
        self._weights, self._board, self._channel = links.weights, links.board, links.channel
        self._check = links.check or links.channel.inbox.check
        dynamic = parts.config.train.dynamic_sampling
        self._shelf = Shelf(make_filter(dynamic) if dynamic is not None else bool)
        self._late = Stepped()  # what the schedule does not know yet: it ended with a step in flight on the device
        self._verdicts: dict[int, bool] = {}  # that the schedule does not know yet
        self._unscored: list[FinishedGroup] = []  # that models beside the engine have yet to score
        self._arrivals: Arrivals | None = None
        self._waits_since: float | None = None
        self._news = NewsExchange(self._board, parts.place.engine, terms.engines)
        self._roll_call = RollCalls(self._board, terms.engines)

    def find_beginning(self) -> Beginning | None:
        """Beginning of the attempt; None after a while without."""
        key = start_key(self._parts.place.engine, self._parts.place.generation)
        start = self._poll(lambda: _posted(self._board, key), "weights")
        if start is None:
            return None
        point = StartPoint.from_json(start)
        published = self._poll(lambda: self._published(point.version), "weights")
        return Beginning(point, published) if published is not None else None

    def begin(self, collector: Collector, beginning: Beginning, state: EngineState | None) -> None:
        """Begins with ``state``, or without any group. Finished groups are delivered again."""
        self._collector, start, self._waits_since = collector, beginning.start, None
        self._log = ActLog(start.version)
        self._schedule: EngineSchedule | RealTimeSchedule
        if self._terms.order == "deterministic" and not self._parts.place.generation:
            known = state.schedule if state is not None else first_state(start.version, start.prompt_cursor)
            self._schedule = EngineSchedule(self._terms, self._parts.place.engine, known)
        else:
            self._schedule = self._real_time_schedule(beginning, state)
        assert self._schedule.version == start.version, (
            f"state of version {self._schedule.version}, not {start.version}"
        )
        if state is not None:
            for held in state.groups:
                self._shelf.add(held)
            if isinstance(self._schedule, EngineSchedule):
                self._late = Stepped(0, list(state.late_ends), list(state.late_calls))
                missing = {*self._schedule.unjudged, *state.late_ends}
                self._note(group for group in self._shelf.delivered if group.number in missing)
            self._count_drops(self._shelf.delivered)
            self._finish(self._shelf.delivered)

    def _real_time_schedule(self, beginning: Beginning, state: EngineState | None) -> RealTimeSchedule:
        """The schedule of this engine with ``schedule: arrival``, or that of the record that is replayed."""
        calls = [call_key((each.group, each.index)) for each in state.in_flight if each.calls] if state else []
        version, requests = beginning.start.version, self._collector.requests
        replayed = self._parts.config.asynchrony.replay
        if replayed is not None:
            lives = read_record(RunFolder(replayed)).lives.get(self._parts.place.engine, [])
            return ReplayedSchedule(self._terms, lives, version, requests, calls)
        return self._arrival_schedule(version, calls)

    def _arrival_schedule(self, version: int, calls: Sequence[int]) -> ArrivalSchedule:
        schedule = ArrivalSchedule(self._terms, version, self._collector.requests, calls)
        self._arrivals = Arrivals(schedule, self._board, self._terms, self._parts.place.engine)
        return schedule

    def decide(self) -> list[RankOrder]:
        """Next action of the engine; nothing if that is not known after a while."""
        orders: list[RankOrder] = []
        until = time.monotonic() + SHARE_SECONDS
        while time.monotonic() < until:
            self._check()
            self.take(self._collector.harvest(wait=False))
            if self._unscored:
                self._post_news()
                return [*orders, RankOrder(self._order_of_scores())]
            if self._terms.elastic:
                self._answer_roll_call()
            if self._arrivals is not None:
                self._arrivals.look(self._published, self._collector)
            action = self._schedule.next()
            self._post_news(action)
            order = self._order_of(action)
            if order is not None:
                self._waits_since = None
                orders.append(order)
            if isinstance(action, Admit):
                self._schedule.admitted(action.group, self._requests_of_group)
                self._log.add("admit", action.group)
            elif order is not None or orders:
                break
            else:
                self._wait(action)
        return orders

    def _answer_roll_call(self) -> None:
        """Answers a roll call with the groups that the engine has. From then on it follows no virtual time."""
        call = self._roll_call.look()
        if call is None:
            return
        if isinstance(self._schedule, EngineSchedule):
            calls, self._late = [*self._schedule.calls, *map(call_key, self._late.calls)], Stepped()
            self._schedule = self._arrival_schedule(self._schedule.version, calls)
        drawn = self._arrivals.drawn if self._arrivals is not None else []
        self._send(Held(self._parts.place.engine, call.number, [*self._shelf.held, *drawn]))

    def admitted(self, held: HeldGroup) -> None:
        """Takes a group whose responses have been requested."""
        self._shelf.add(held)

    def stepped(self, requests: int, stepped: Stepped) -> None:
        """Reports an engine step."""
        stepped, self._late = self._late.then(stepped), Stepped()
        self._schedule.stepped(
            requests,
            left=self._collector.requests,
            ended=stepped.ended_groups,
            calls=[call_key(place) for place in stepped.calls],
        )
        self._log.stepped()
        self._note([])

    def answered(self, key: int, stepped: Stepped) -> None:
        """Reports that a reply of tools was taken."""
        self._schedule.answered(key, left=self._collector.requests, ended=stepped.ended_groups)
        self._log.add("answer", key)

    def lent(self, requests: int) -> None:
        """Reports that each lender has got so many requests."""
        assert isinstance(self._schedule, EngineSchedule)
        self._schedule.lent(requests, left=self._collector.requests)

    def taken_back(self, lender: int, stepped: Stepped) -> None:
        """Reports that a lender's requests were taken back."""
        calls = [call_key(place) for place in stepped.calls]
        assert isinstance(self._schedule, EngineSchedule)
        self._schedule.taken_back(lender, left=self._collector.requests, ended=stepped.ended_groups, calls=calls)

    def give_up(self) -> None:
        """Delivers what is finished, and forgets all groups."""
        assert isinstance(self._schedule, ReplayedSchedule)
        self.take(self._collector.harvest())
        self._shelf.held.clear()
        self._schedule.gave_up()

    def switched(self, published: Published, late: Stepped) -> None:
        """Reports a switch. ``late``: what ended with the step in flight on the device."""
        self._schedule.switched(published.version)
        self._log.add("switch", published.version)
        if isinstance(self._schedule, EngineSchedule):
            self._late.ended_groups += late.ended_groups
            self._late.calls += late.calls
            first = self._schedule.first_needed
            assert first == published.prompt_cursor, (
                f"trainers consumed groups up to {published.prompt_cursor}, not {first}"
            )
            self._shelf.forget(first)
        else:
            self._schedule.settled(left=self._collector.requests, calls=[call_key(place) for place in late.calls])
            self._shelf.remove(published.done, before=published.prompt_cursor)
        if self._arrivals is not None:
            self._arrivals.switched(published.version)
        if not published.ends and published.version < self._terms.steps:  # the trainers may have ended
            self._deliver([])

    def save(self, published: Published, drafts: Sequence[Draft]) -> None:
        """Writes the engine's part of a checkpoint, directly after the switch to its version."""
        schedule, place = self._schedule.state(), self._parts.place
        with self._meter.waits("rewards"):
            found = self._collector.harvest()
        self.take(found)
        state = EngineState(
            published.version,
            place.engine,
            place.engines,
            schedule,
            tuple(
                InFlightResponse(task.group, task.index, draft.calls, task.tool_calls, task.failed_tool_calls)
                for draft in drafts
                for task in [draft.task]
            ),
            drafted(self._shelf.held, drafts),
            tuple(self._late.ended_groups),
            tuple(self._late.calls),
            self._terms.max_staleness,
            self._terms.groups_per_step,
        )
        error: OSError | None = None
        try:
            state.save(Path(published.checkpoint))
        except OSError as raised:
            error = raised  # the trainers decide what it means
        self._send(Written(place.engine, published.version, error, self._log.take(), self._life))

    def validated(self, version: int, held_out: Sequence[Scored], seconds: float) -> None:
        """Delivers answers to held-out prompts, which have taken so many seconds."""
        self._send(Validated(self._parts.place.engine, version, held_out, seconds))

    def take(self, found: Sequence[Scored]) -> None:
        """Takes scored responses; delivers the groups that are finished with them, once models have scored them."""
        groups = self._shelf.put(found)
        self._note(groups)
        self._count_drops(groups)
        if groups:
            self._finish(groups)

    def deliver_scored(self, groups: Sequence[FinishedGroup]) -> None:
        """Delivers groups that models have scored, with the routed experts that were left out."""
        self._deliver(
            [replace(one, group=with_routed_experts(one.group, self._shelf.held[one.number].group)) for one in groups]
        )

    def _count_drops(self, groups: Sequence[FinishedGroup]) -> None:
        """With arrival order a group that the filter drops lets another one start."""
        if self._arrivals is not None:
            self._arrivals.drop(groups)

    def _finish(self, groups: Sequence[FinishedGroup]) -> None:
        if self._parts.models is None:
            self._deliver(groups)
        else:
            self._unscored += groups

    def _order_of_scores(self) -> ScoreGroups:
        """The order to score all groups that wait for it."""
        groups, self._unscored = self._unscored, []
        return ScoreGroups([replace(one, group=without_routed_experts(one.group)) for one in groups])

    def _deliver(self, groups: Sequence[FinishedGroup]) -> None:
        """Sends groups to the trainers, with what the engine has done since the last time."""
        activity = self._meter.take({**self._parts.engine.statistics(), **self._collector.statistics()})
        engine, version = self._parts.place.engine, self._schedule.version
        self._send(Delivered(engine, tuple(groups), activity, version, self._log.take(), self._life))

    @property
    def _life(self) -> int:
        """Number of earlier starts of the engine, in this attempt or in the run that is replayed."""
        return self._schedule.life if isinstance(self._schedule, ReplayedSchedule) else self._parts.place.generation

    @property
    def _requests_of_group(self) -> int:
        return self._parts.config.rollout.samples_per_prompt + self._parts.needs_greedy

    def _order_of(self, action: Action) -> RankOrder | None:
        """The order, if the action can be done now."""
        if isinstance(action, AwaitNews):
            return None
        if isinstance(action, Switch):
            published = self._published(action.version)
            return RankOrder(action, published=published) if published is not None else None
        if isinstance(action, TakeBack):
            returned = self._lending.returned(action.lender)
            return RankOrder(action, returned=returned) if returned is not None else None
        return RankOrder(action)

    def _published(self, version: int) -> Published | None:
        """A version whose weights have arrived."""
        record = _posted(self._board, published_key(version))
        return Published.from_json(record) if record is not None and self._weights.ready(version) else None

    def _post_news(self, action: Action | None = None) -> None:
        if isinstance(self._schedule, EngineSchedule):
            self._news.post(self._schedule, action)

    def _wait(self, action: Action) -> None:
        """Waits a little for what an action needs, and learns what is new."""
        what = "trainers" if isinstance(action, TakeBack) else "weights"
        if isinstance(action, AwaitNews) and isinstance(self._schedule, EngineSchedule):
            self._news.learn(self._schedule)
            what = "rewards" if action.verdicts else "engines"
        self._pause(what)

    def _pause(self, what: str) -> None:
        """Waits a twentieth of the wait so far, longer in a large job: its ranks share the store that has the board."""
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        with self._meter.waits(what):
            time.sleep(look_seconds(self._terms.engines, now - self._waits_since))

    def _note(self, groups: Iterable[FinishedGroup]) -> None:
        """Reports verdicts of groups; of those of which the schedule does not know yet that they have ended, later."""
        if not self._terms.filtered or not isinstance(self._schedule, EngineSchedule):
            return
        self._verdicts |= {group.number: group.keeps for group in groups}
        for number in sorted(self._verdicts.keys() - self._late.ended_groups):
            self._schedule.judged(number, self._verdicts.pop(number))

    def _send(self, message: Message) -> None:
        """Queues a message. In the midst of an order no rank may leave: ``decide`` meets the loss of the trainers."""
        try:
            self._channel.send(message)
        except PeerLost:
            if not self._parts.place.outlives:
                raise

    def _poll(self, find: Callable[[], T | None], what: str) -> T | None:
        """Result of ``find`` within a while."""
        until = time.monotonic() + SHARE_SECONDS
        while (found := find()) is None and time.monotonic() < until:
            self._check()
            self._pause(what)
        return found


def look_seconds(engines: int, waited: float) -> float:
    """Time between two looks at the board of an engine that has waited for some time."""
    shortest = max(_SHORTEST_LOOK_SECONDS, _LOOK_SECONDS * engines)
    return min(max(shortest, waited / 20), _LONGEST_LOOK_SECONDS)


def _posted(board: Board, key: str) -> dict[str, object] | None:
    """A value of the board, None if it is not there."""
    found: dict[str, object] | None = board.read([key]).get(key)
    return found
