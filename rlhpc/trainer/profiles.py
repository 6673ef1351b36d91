"""Steps that this rank profiles: those of the configuration, and those of requests to the running job."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlhpc.api import RunState
from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.heartbeat import touch
from rlhpc.core.profiles import (
    NOTHING,
    ProfileAnswer,
    ProfileRequest,
    Selection,
    from_numbers,
    read_answer,
    read_request,
    write_answer,
)
from rlhpc.core.shown import ShownOnly
from rlhpc.core.storage import NONE
from rlhpc.observe.metrics import Stopwatch
from rlhpc.observe.profiles.recorder import Profiled, Recorder
from rlhpc.observe.profiles.tools import missing

_log = logging.getLogger(__name__)


class Profiles:
    """Profiles of one rank. ``offer`` and ``take`` are its part in the collective at the end of each step, by which all
    ranks know of a request before the next step."""

    def __init__(self, config: RunConfig, context: RankContext, profiled: Profiled, state: RunState) -> None:
        section, self._context, self._steps = config.profile, context, config.train.steps
        self._agenda = list(section.selections)
        self._wrapped = section.rank_ranges if "nsys" in section.tools else ()  # ranks under Nsight Systems
        # Steps are those of RL, or of the warm-up if there is nothing else.
        self._phase = "rl" if config.train.steps else "sft"
        self._last = config.train.steps or (config.sft.steps if config.sft else 0)
        self._step = state.step if config.train.steps else state.sft_step
        self._rank = context.info.rank
        self._most = section.max_mib * 2**20
        self._recorder = Recorder(context.attempt, self._rank, self._most, profiled)
        self._present: Selection | None = None
        self._guard = ShownOnly("requests for profiles")
        self._answered = ""
        self._offered: ProfileRequest | None = None
        answer = read_answer(context.run)
        if answer is not None:  # of an earlier attempt, which may have ended before its steps
            self._answered = answer.id
            if not answer.refused and answer.selection.last > self._step:
                self._agenda.append(answer.selection)
        if "memory" in section.tools and any(self._rank in part for part in section.rank_ranges):
            if reason := missing(["memory"]):
                _log.warning("profile.tools: %s", reason)
            else:
                self._recorder.watch_memory()

    def begin(self, phase: str, step: int) -> None:
        """Begins the profile of a step, if it is due on this rank."""
        if phase != self._phase:
            return
        self._step = step
        self._recorder.passed(step)
        if not self._agenda:
            return
        self._agenda = [selection for selection in self._agenda if selection.last >= step]
        self._present = next((one for one in reversed(self._agenda) if one.covers(step, self._rank)), None)
        if self._present is not None:
            self._recorder.begin(self._present)
            Stopwatch.hook = self._recorder

    def end(self) -> None:
        """Ends collecting, before the step's metrics are recorded."""
        if self._present is not None:
            Stopwatch.hook = None
            self._recorder.end()

    def write(self) -> None:
        """Writes the profile of the step that ended last."""
        present, self._present = self._present, None
        if present is not None:
            touch("writing a profile", self._step)
            self._recorder.write(self._most // 2 // present.count(self._context.info.world_size))

    def offer(self) -> Sequence[int]:
        """Numbers of a new request, zeros without any. All ranks take their maximum."""
        if self._rank:
            return NOTHING
        self._offered = None
        with self._guard:
            request = read_request(self._context.run)
            if request is not None and request.id != self._answered:
                self._answered = request.id
                return self._weigh(request)
        return NOTHING

    def take(self, numbers: Sequence[int]) -> None:
        """Plans the profile that the first rank has offered."""
        selection = from_numbers(numbers)
        if selection is not None:
            self._agenda.append(selection)
        if selection is not None and self._offered is not None:
            self._answer(ProfileAnswer(self._offered.id, selection))

    def _weigh(self, request: ProfileRequest) -> Sequence[int]:
        """Numbers of the request, or zeros if it is refused."""
        selection = request.at(self._step)
        if reason := self._refusal(selection):
            _log.warning("request for a profile of step %s: %s", selection.steps, reason)
            self._answer(ProfileAnswer(request.id, selection, reason))
            return NOTHING
        self._offered = request
        return selection.as_numbers()

    def _refusal(self, selection: Selection) -> str:
        """Why a request cannot be met; empty if it can."""
        if selection.first <= self._step:
            return f"step {selection.first} has passed; ask for step {self._step + 1} or later"
        if selection.last > self._last:
            return f"step {selection.last} is after the last one, {self._last}"
        ranks = [rank for rank in range(self._context.info.world_size) if selection.covers(selection.first, rank)]
        if "nsys" in selection.tools and not all(any(rank in part for part in self._wrapped) for rank in ranks):
            return "nsys needs ranks that were started under it: name nsys and the ranks in the section profile"
        return missing(selection.tools)

    def _answer(self, answer: ProfileAnswer) -> None:
        with self._guard:
            write_answer(self._context.run, answer, NONE)
