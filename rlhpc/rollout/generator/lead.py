"""The first rank of an engine: decides what the engine does next, judges groups and delivers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlhpc.data.group_filter import make_filter
from rlhpc.data.groups import with_routed_experts, without_routed_experts
from rlhpc.parallel.board import Board
from rlhpc.rollout.collect import Collector, Draft, Scored, Stepped
from rlhpc.rollout.generator.lending import LentRequests
from rlhpc.rollout.generator.messages import (
    START_KEY,
    Delivered,
    FinishedGroup,
    Message,
    Published,
    Returned,
    StartPoint,
    Validated,
    Written,
    news_key,
    published_key,
)
from rlhpc.rollout.generator.meter import ActivityMeter
from rlhpc.rollout.generator.parts import GeneratorParts, Links
from rlhpc.rollout.generator.responses import drafted
from rlhpc.rollout.generator.shelf import HeldGroup, Shelf, call_key
from rlhpc.rollout.generator.state import EngineState, InFlightResponse
from rlhpc.rollout.schedule.actions import Action, Admit, AwaitNews, EngineStep, Switch, TakeBack
from rlhpc.rollout.schedule.engine_schedule import EngineSchedule
from rlhpc.rollout.schedule.states import first_state
from rlhpc.rollout.schedule.terms import Terms

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.0005, 0.05  # between two looks at the board, by engine
_SHORTEST_LOOK_SECONDS = 0.001
_NEWS_SECONDS, _LONGEST_NEWS_SECONDS = 0.002, 0.1  # between two news, by engine: the store takes a few hundred a second
_SHARE_SECONDS = 5.0  # after which other ranks of the engine hear of it again: shorter than any timeout of a group

T = TypeVar("T")


@dataclass(frozen=True)
class ScoreGroups:
    """Let the models beside the engine score groups. No action of a schedule: it takes no virtual time."""

    groups: Sequence[FinishedGroup]  # without routed experts


@dataclass(frozen=True)
class RankOrder:
    """What all ranks of the engine do next. ``published``: the version to switch to; ``returned``: what a lender
    returns."""

    action: Action | ScoreGroups
    published: Published | None = None
    returned: Returned | None = None


@dataclass(frozen=True)
class Beginning:
    """Where an attempt begins: its first version as published, and the state that the engine resumes from, if any."""

    start: StartPoint
    published: Published


class Lead:
    """What the first rank of an engine does beside its ranks' common work."""

    def __init__(
        self, parts: GeneratorParts, links: Links, terms: Terms, meter: ActivityMeter, lending: LentRequests
    ) -> None:
        assert links.board is not None, "the first rank of an engine has a board"
        assert links.channel is not None, "the first rank of an engine has a channel to the trainers"
        self._parts, self._terms, self._meter, self._lending = parts, terms, meter, lending
        self._weights, self._board, self._channel = links.weights, links.board, links.channel
        dynamic = parts.config.train.dynamic_sampling
        self._shelf = Shelf(make_filter(dynamic) if dynamic is not None else bool)
        self._late = Stepped()  # what the schedule does not know yet: it ended with a step in flight on the device
        self._verdicts: dict[int, bool] = {}  # that the schedule does not know yet
        self._unscored: list[FinishedGroup] = []  # that models beside the engine have yet to score
        self._waits_since: float | None = None
        self._posted = float("-inf")

    def find_beginning(self) -> Beginning | None:
        """Where the attempt begins; None after a while without."""
        start = self._poll(lambda: _posted(self._board, START_KEY), "weights")
        if start is None:
            return None
        point = StartPoint.from_json(start)
        published = self._poll(lambda: self._published(point.version), "weights")
        return Beginning(point, published) if published is not None else None

    def begin(self, collector: Collector, beginning: Beginning, state: EngineState | None) -> None:
        """Begins with ``state``, or without any group. Finished groups are delivered again."""
        self._collector, start, self._waits_since = collector, beginning.start, None
        known = state.schedule if state is not None else first_state(start.version, start.prompt_cursor)
        self._schedule = EngineSchedule(self._terms, self._parts.place.engine, known)
        assert self._schedule.version == start.version, (
            f"state of version {self._schedule.version}, not {start.version}"
        )
        if state is not None:
            for held in state.groups:
                self._shelf.add(held)
            self._late = Stepped(0, list(state.late_ends), list(state.late_calls))
            missing = {*self._schedule.unjudged, *state.late_ends}
            self._note(group for group in self._shelf.delivered if group.number in missing)
            self._finish(self._shelf.delivered)

    def decide(self) -> list[RankOrder]:
        """What the engine does next; nothing if that is not known after a while."""
        orders: list[RankOrder] = []
        until = time.monotonic() + _SHARE_SECONDS
        while time.monotonic() < until:
            self._channel.inbox.check()
            self.take(self._collector.harvest(wait=False))
            if self._unscored:
                self._post_news()
                return [*orders, RankOrder(self._order_of_scores())]
            action = self._schedule.next()
            self._post_news(action)
            order = self._order_of(action)
            if order is not None:
                self._waits_since = None
                orders.append(order)
            if isinstance(action, Admit):
                self._schedule.admitted(action.group, self._requests_of_group)
            elif order is not None or orders:
                break
            else:
                self._wait(action)
        return orders

    def admitted(self, held: HeldGroup) -> None:
        """Takes a group whose responses have been requested."""
        self._shelf.add(held)

    def stepped(self, requests: int, stepped: Stepped) -> None:
        """Reports an engine step."""
        late, self._late = self._late, Stepped()
        self._schedule.stepped(
            requests,
            left=self._collector.requests,
            ended=[*late.ended_groups, *stepped.ended_groups],
            calls=[call_key(place) for place in (*late.calls, *stepped.calls)],
        )
        self._note([])

    def answered(self, key: int, stepped: Stepped) -> None:
        """Reports that a reply of tools was taken."""
        self._schedule.answered(key, left=self._collector.requests, ended=stepped.ended_groups)

    def lent(self, requests: int) -> None:
        """Reports that each lender has got so many requests."""
        self._schedule.lent(requests, left=self._collector.requests)

    def taken_back(self, lender: int, stepped: Stepped) -> None:
        """Reports that a lender's requests were taken back."""
        calls = [call_key(place) for place in stepped.calls]
        self._schedule.taken_back(lender, left=self._collector.requests, ended=stepped.ended_groups, calls=calls)

    def switched(self, published: Published, late: Stepped) -> None:
        """Reports a switch. ``late``: what ended with the step in flight on the device."""
        self._late.ended_groups += late.ended_groups
        self._late.calls += late.calls
        self._schedule.switched(published.version)
        first = self._schedule.first_needed
        assert first == published.prompt_cursor, (
            f"trainers consumed groups up to {published.prompt_cursor}, not {first}"
        )
        self._shelf.forget(first)
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
        self._send(Written(place.engine, published.version, error))

    def validated(self, version: int, held_out: Sequence[Scored], seconds: float) -> None:
        """Delivers answers to held-out prompts, which have taken so many seconds."""
        self._send(Validated(self._parts.place.engine, version, held_out, seconds))

    def take(self, found: Sequence[Scored]) -> None:
        """Takes scored responses; delivers the groups that are finished with them, once models have scored them."""
        groups = self._shelf.put(found)
        self._note(groups)
        if groups:
            self._finish(groups)

    def deliver_scored(self, groups: Sequence[FinishedGroup]) -> None:
        """Delivers groups that models have scored, with the routed experts that were left out."""
        self._deliver(
            [replace(one, group=with_routed_experts(one.group, self._shelf.held[one.number].group)) for one in groups]
        )

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
        activity = self._meter.take(self._parts.engine.statistics())
        self._send(Delivered(self._parts.place.engine, tuple(groups), activity, self._schedule.version))

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
        """Posts what other engines may wait for, before anything that takes long; between steps only now and then."""
        seconds = min(_NEWS_SECONDS * self._terms.engines, _LONGEST_NEWS_SECONDS)
        between_steps = isinstance(action, EngineStep | Admit) and time.monotonic() < self._posted + seconds
        if self._terms.engines > 1 and self._schedule.has_news and not between_steps:
            self._board.post(news_key(self._parts.place.engine), self._schedule.news())
            self._posted = time.monotonic()

    def _wait(self, action: Action) -> None:
        """Waits a little for what an action needs, and learns what is new."""
        what = "trainers" if isinstance(action, TakeBack) else "weights"
        if isinstance(action, AwaitNews):
            self._learn()
            what = "rewards" if action.verdicts else "engines"
        self._pause(what)

    def _pause(self, what: str) -> None:
        """Waits a twentieth of the wait so far, longer in a large job: its ranks share the store that has the board."""
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        with self._meter.waits(what):
            time.sleep(look_seconds(self._terms.engines, now - self._waits_since))

    def _learn(self) -> None:
        others = [engine for engine in range(self._terms.engines) if engine != self._parts.place.engine]
        news = self._board.read(map(news_key, others))
        for engine in others:
            if news_key(engine) in news:
                self._schedule.learn(engine, news[news_key(engine)])

    def _note(self, groups: Iterable[FinishedGroup]) -> None:
        """Reports verdicts of groups; of those of which the schedule does not know yet that they have ended, later."""
        if not self._terms.filtered:
            return
        self._verdicts |= {group.number: group.keeps for group in groups}
        for number in sorted(self._verdicts.keys() - self._late.ended_groups):
            self._schedule.judged(number, self._verdicts.pop(number))

    def _send(self, message: Message) -> None:
        self._channel.send(message)

    def _poll(self, find: Callable[[], T | None], what: str) -> T | None:
        """What ``find`` finds within a while."""
        until = time.monotonic() + _SHARE_SECONDS
        while (found := find()) is None and time.monotonic() < until:
            self._channel.inbox.check()
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
