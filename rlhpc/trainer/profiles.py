"""Steps that this rank profiles: those of the configuration, and coming ones that `rlhpc profile` asks for."""

from __future__ import annotations

from collections.abc import Callable

from rlhpc.config.schema import RunConfig
from rlhpc.core.context import RankContext
from rlhpc.core.files import read_json
from rlhpc.core.heartbeat import touch
from rlhpc.core.shown import ShownOnly
from rlhpc.core.storage import NONE
from rlhpc.observe.metrics import Stopwatch
from rlhpc.observe.profiles import StepProfile


class Profiles:
    """Profiles of one rank, if the configuration names it. ``asked`` and ``take`` are its part in the collective at the
    end of each step, by which all ranks know of a request before the next step."""

    def __init__(self, config: RunConfig, context: RankContext, settle: Callable[[], None]) -> None:
        """``settle``: see ``StepProfile``."""
        section, self._context, rank = config.profile, context, context.info.rank
        # Steps are those of RL, or of the warm-up if there is nothing else.
        self._phase = "rl" if config.train.steps else "sft"
        self._steps, self._step, self._coming = section.step_ranges, 0, 0
        named = any(rank in part for part in section.rank_ranges)
        self._profile = StepProfile(context.run, rank, section.tools, settle) if named else None
        self._present: StepProfile | None = None
        self._guard = ShownOnly("requests for profiles")

    def begin(self, phase: str, step: int) -> None:
        """Begins the profile of a step, if it is due on this rank."""
        if phase != self._phase:
            return
        due = self._coming > 0 or any(step in part for part in self._steps)
        self._step, self._coming = step, max(0, self._coming - 1)
        self._present = self._profile if due else None
        if self._present is not None:
            self._present.begin(step)
            Stopwatch.hook = self._present

    def end(self) -> None:
        """Ends collecting, before the step's metrics are recorded."""
        if self._present is not None:
            Stopwatch.hook = None
            self._present.end()

    def write(self) -> None:
        """Writes the profile of the step that ended last."""
        present, self._present = self._present, None
        if present is not None:
            touch("writing a profile", self._step)
            present.write()

    def asked(self) -> int:
        """Number of coming steps that a new request asks for, known on the first rank; 0 without any. Takes the request
        away: one whose profile ends the ranks is not repeated."""
        if self._context.info.rank == 0:
            with self._guard:
                try:
                    request = read_json(self._context.run.profile_request, NONE)
                except FileNotFoundError:
                    return 0
                self._context.run.profile_request.unlink()
                return max(0, int(request["steps"]))
        return 0

    def take(self, steps: int) -> None:
        """Plans the profiles of coming steps that the first rank was asked for."""
        self._coming = max(self._coming, steps)
