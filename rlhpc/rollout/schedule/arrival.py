"""Next action of one engine with `schedule: arrival`: the first one possible in real time, or the recorded one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhpc.rollout.schedule.actions import Action, Admit, Answer, AwaitNews, End, EngineStep, GiveUp, Switch
from rlhpc.rollout.schedule.acts import Act, ActKind, ActLog
from rlhpc.rollout.schedule.states import State
from rlhpc.rollout.schedule.terms import Terms


class RealTimeSchedule(ABC):
    """An engine whose order of actions does not follow from virtual time. Its reports are those of ``EngineSchedule``;
    subclasses decide."""

    def __init__(self, terms: Terms, version: int, requests: int = 0, calls: Iterable[int] = ()) -> None:
        """``requests``, ``calls``: in the engine, and keys of tool calls in progress, where it resumes."""
        self._terms, self.version = terms, version
        self._requests, self._calls = requests, [*calls]

    @abstractmethod
    def next(self) -> Action:
        """Action to take now; ``AwaitNews`` if there is none before something new arrives."""

    def admitted(self, group: int, requests: int) -> None:
        """See ``EngineSchedule``, as for all reports."""
        self._requests += requests

    def stepped(self, requests: int, *, left: int, ended: Sequence[int] = (), calls: Sequence[int] = ()) -> None:
        self.settled(left=left, calls=calls)

    def settled(self, *, left: int, calls: Sequence[int] = ()) -> None:
        """Reports what has changed, by an engine step or, at a switch, with the one in flight on the device."""
        assert not {*calls} & {*self._calls}, f"calls {calls} are in progress already"
        self._requests = left
        self._calls += calls

    def answered(self, key: int, *, left: int, ended: Sequence[int] = ()) -> None:
        self._calls.remove(key)
        self._requests = left

    def switched(self, version: int) -> None:
        assert version == self.version + 1, f"version {version} after {self.version}"
        self.version = version

    def state(self) -> State:
        """JSON from which the engine continues, besides its responses."""
        return {"version": self.version, "real_time": True}


class ArrivalSchedule(RealTimeSchedule):
    """Switches as soon as new weights are there, and starts a group as soon as there is a slot and a group.

    Before ``next``, a loop reports what is new: ``offer_version``, ``offer_answer``, and ``offer_group`` where
    ``wants_group``.
    """

    def __init__(self, terms: Terms, version: int, requests: int = 0, calls: Iterable[int] = ()) -> None:
        super().__init__(terms, version, requests, calls)
        self._version_ready = False
        self._answers: list[int] = []
        self._group: int | None = None

    def next(self) -> Action:
        """Action to take now; ``AwaitNews`` if there is none before something new is offered."""
        if self.version >= self._terms.steps:
            return End()
        finishing = self._version_ready and self._terms.in_flight == "finish"
        if self._version_ready and not (finishing and (self._requests or self._calls)):
            return Switch(self.version + 1)
        if self._answers:
            return Answer(self._answers[0])
        if self._group is not None and not finishing and self._requests < self._terms.slots:
            return Admit(self._group)
        return EngineStep() if self._requests else AwaitNews()

    @property
    def wants_group(self) -> bool:
        """True if it could start a group."""
        finishing = self._version_ready and self._terms.in_flight == "finish"
        return self._group is None and not finishing and self._requests < self._terms.slots

    @property
    def offered_group(self) -> int | None:
        """The group that it is to start next."""
        return self._group

    @property
    def open_calls(self) -> list[int]:
        """Keys of tool calls whose answers have not been offered."""
        return [key for key in self._calls if key not in self._answers]

    def offer_version(self) -> None:
        """The next version has arrived."""
        self._version_ready = True

    def offer_group(self, group: int) -> None:
        """This engine is to start a group, now or later."""
        assert self._group is None, f"group {group} before {self._group} has started"
        self._group = group

    def offer_answer(self, key: int) -> None:
        """The answer of a tool call has arrived."""
        self._answers.append(key)

    def admitted(self, group: int, requests: int) -> None:
        super().admitted(group, requests)
        self._group = None

    def answered(self, key: int, *, left: int, ended: Sequence[int] = ()) -> None:
        super().answered(key, left=left, ended=ended)
        self._answers.remove(key)

    def switched(self, version: int) -> None:
        super().switched(version)
        self._version_ready = False


class ReplayedSchedule(RealTimeSchedule):
    """Does what the record of a run says.

    An engine that was lost and came back has several lives in the record. At the end of each, the engine finishes what
    it has begun, then switches up to the version with which the next one begins.
    """

    def __init__(
        self,
        terms: Terms,
        lives: Sequence[Sequence[Act]],
        version: int,
        requests: int = 0,
        calls: Iterable[int] = (),
    ) -> None:
        """``lives``: all acts of the engine, in order, those before ``version`` too."""
        super().__init__(terms, version, requests, calls)
        acts = [(act, life) for life, acts in enumerate(lives) for act in acts if act.version >= version]
        self._left = acts[::-1]
        begun = not acts or acts[0][0].version == version
        self.life = (acts[0][1] if acts else 0) - (not begun)
        self._log = ActLog(version)

    def next(self) -> Action:
        """Recorded action; it waits for weights and answers that are not there yet."""
        if self.version >= self._terms.steps:
            return End()
        act, life = self._left[-1] if self._left else (None, self.life)
        if act is None or life != self.life:
            if self._requests:
                return EngineStep()
            if act is None or act.version > self.version:
                return Switch(self.version + 1)
            return GiveUp()
        if (act.version, act.steps) == (self._log.version, self._log.steps):
            match act.kind:
                case "admit":
                    return Admit(act.value)
                case "answer":
                    return Answer(act.value)
                case _:
                    return Switch(act.value)
        return EngineStep() if self._requests else AwaitNews()

    def gave_up(self) -> None:
        """Reports that nothing is left of this life."""
        self.life, self._log, self._calls = self._left[-1][1], ActLog(self.version), []

    def stepped(self, requests: int, *, left: int, ended: Sequence[int] = (), calls: Sequence[int] = ()) -> None:
        super().stepped(requests, left=left, ended=ended, calls=calls)
        self._log.stepped()

    def admitted(self, group: int, requests: int) -> None:
        super().admitted(group, requests)
        self._done("admit", group)

    def answered(self, key: int, *, left: int, ended: Sequence[int] = ()) -> None:
        super().answered(key, left=left, ended=ended)
        self._done("answer", key)

    def switched(self, version: int) -> None:
        super().switched(version)
        self._done("switch", version)

    def _done(self, kind: ActKind, value: int) -> None:
        done = self._log.add(kind, value)
        if self._left and self._left[-1][1] == self.life:
            expected, _ = self._left.pop()
            assert expected == done, f"{done}, not {expected}"


def is_real_time(state: Mapping[str, Any]) -> bool:
    """True if an engine's state is one of a real-time schedule."""
    return bool(state.get("real_time"))
