"""One engine's part of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.rollout.schedule.actions import Action
from rlhpc.rollout.schedule.terms import Terms

State = dict[str, Any]  # JSON
News = dict[str, Any]  # JSON


def first_state(terms: Terms, version: int, group: int) -> State:
    """State of every engine of a run that begins with ``version``, whose step trains on the groups from ``group`` on:
    after steps in another placement, or at the beginning with 0 and 0."""
    raise NotImplementedError


def redistributed(terms: Terms, states: Sequence[State]) -> list[State]:
    """States of ``terms.engines`` engines from those that another number of engines wrote at the same version: the
    groups in flight start with fewer engines or more, none is lost and none is there twice. Tool calls are due as they
    were; the clocks become equal. The continuation differs from that of the engines that wrote the states."""
    raise NotImplementedError


class EngineSchedule:
    """Decides what one engine does next.

    A loop calls ``next`` and does what it says, until ``End``::

        match schedule.next():
            case Switch(version): ...; schedule.switched(version)
            case Admit(group): ...; schedule.admitted(group, requests)
            case Answer(key): ...; schedule.answered(key, left=..., ended=...)
            case EngineStep(): ...; schedule.stepped(requests, left=..., ended=..., calls=...)
            case AwaitNews(): post schedule.news(), read the others' news and learn() them, take verdicts

    and posts ``news()`` when ``has_news``, in place of the last. Real time decides only how long it waits: news may be
    late, or skipped for later ones, but those of one attempt never come after older ones of the former attempt.
    """

    def __init__(self, terms: Terms, engine: int, state: Mapping[str, Any] | None = None) -> None:
        """``state``: what ``state()`` returned when this engine switched to the version that is resumed."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        raise NotImplementedError

    @property
    def clock(self) -> int:
        """Virtual time in nanoseconds."""
        raise NotImplementedError

    def next(self) -> Action:
        """What to do now. Again the same until it is reported or news arrive; moves only an idle engine's clock."""
        raise NotImplementedError

    def admitted(self, group: int, requests: int) -> None:
        """Reports the start of a group with its number of requests to the engine."""
        raise NotImplementedError

    def stepped(self, requests: int, *, left: int, ended: Sequence[int] = (), calls: Sequence[int] = ()) -> None:
        """Reports a step of ``requests`` requests. ``left``: requests in the engine after it, running and waiting;
        ``ended``: groups whose last response has ended; ``calls``: keys of the responses that now wait for tools."""
        raise NotImplementedError

    def answered(self, key: int, *, left: int, ended: Sequence[int] = ()) -> None:
        """Reports that a tool's answer was taken. ``left``: requests in the engine now; ``ended``: the group, if the
        answer has ended its last response."""
        raise NotImplementedError

    def switched(self, version: int) -> None:
        """Reports that the engine has the weights of ``version``."""
        raise NotImplementedError

    def judged(self, group: int, keeps: bool) -> None:  # noqa: FBT001
        """Reports whether the filter keeps an ended group of this engine. Not needed without a filter."""
        raise NotImplementedError

    def learn(self, engine: int, news: News) -> None:
        """Takes the news of another engine; older ones than before and its own are ignored."""
        raise NotImplementedError

    @property
    def has_news(self) -> bool:
        """Whether others may wait for what has changed since the last ``news()``."""
        raise NotImplementedError

    def news(self) -> News:
        """What the others need: JSON, bounded by the groups of ``max_staleness`` + 2 batches or so."""
        raise NotImplementedError

    def state(self) -> State:
        """JSON from which the engine continues identically, taken after ``switched(version)`` and before anything
        else, if all engines are restored from theirs of that version. Verdicts that are missing then are reported
        again, see ``unjudged``; tool calls under way are called again."""
        raise NotImplementedError

    @property
    def unjudged(self) -> tuple[int, ...]:
        """Ended groups of this engine whose verdicts have not been reported."""
        raise NotImplementedError

    def batch_of(self, group: int) -> int | None:
        """The step that trains on a group or drops it, as far as it is known and not forgotten; a group of a step
        before ``version`` may be forgotten. None: not known yet."""
        raise NotImplementedError

    @property
    def first_needed(self) -> int:
        """First group of the step that trains with ``version``: a state at this version needs the ended groups from it
        on, and no earlier ones."""
        raise NotImplementedError
