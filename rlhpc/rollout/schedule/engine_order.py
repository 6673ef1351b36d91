"""In which order one engine of a separate placement runs the responses of its groups, by its own steps.

The schedule decides which groups it has; of those that wait, the batches of earlier steps come first. A deal is due at
the first step after each switch, and then at fixed numbers of steps. So it depends on the engine's steps and tokens
alone, and a run that resumes at a switch repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from rlhpc.rollout.schedule.response_order import (
    Dealing,
    ExpectedLengths,
    Place,
    Unfinished,
    interval_of,
    ordered,
    turn_of,
)


class EngineOrder:
    """The order of one engine's responses. ``switch`` comes first, also where a run resumes.

    ``groups_per_step``: see ``Terms``.
    """

    def __init__(self, dealing: Dealing, groups_per_step: int) -> None:
        self._turns, self._groups_per_step = dealing == "turns", groups_per_step
        self._expected = ExpectedLengths(lambda _: 1.0, 1.0)
        self._mean, self._first, self._steps = 1.0, 0, 0

    def switch(
        self, mean: float, ratios: Mapping[int, float] | None = None, first: int = 0, done: Collection[int] = ()
    ) -> None:
        """The engine has another version. ``mean``: expected tokens of a response; ``ratios``: by group, the expected
        length of its prompt's over that; ``first``, ``done``: groups before ``first`` and those of ``done`` have been
        trained on."""
        known = ratios or {}
        self._expected.renew(lambda group: known.get(group, 1.0), mean)
        self._expected.forget(lambda group: group < first or group in done)
        self._mean, self._first, self._steps = mean, first, 0

    def restart(self) -> None:
        """The engine has no group any more, as when it begins with its version."""
        self._expected.forget(lambda _: True)
        self._steps = 0

    @property
    def interval(self) -> int:
        """Engine steps between two deals."""
        return interval_of(self._mean)

    @property
    def until_due(self) -> int:
        """Engine steps until the next deal; 0: before the next step."""
        return -self._steps % self.interval

    def matters(self, waiting: Collection[int]) -> bool:
        """True if a deal can change what runs. ``waiting``: groups of those that wait. Without turns the order of one
        group's does not matter: the same is expected of them."""
        return len({*waiting}) > (0 if self._turns else 1)

    def is_due(self, waiting: Collection[int]) -> bool:
        """True if responses are dealt before the next step."""
        return not self.until_due and self.matters(waiting)

    def stepped(self, steps: int = 1) -> None:
        """Counts engine steps."""
        self._steps += steps

    def note(self, ended: Iterable[tuple[int, int]]) -> None:
        """Counts responses that have ended: their groups and lengths."""
        self._expected.note(ended)

    def ordered(self, responses: Sequence[Unfinished]) -> list[Place]:
        """The engine's responses in the order in which they run."""
        turn = turn_of(self._mean) if self._turns else None
        return [response.place for response in ordered(responses, self._expected, turn, self._batch)]

    def _batch(self, group: int) -> int:
        """By which the groups of earlier steps come first: how many steps ahead it would be if the filter drops
        none."""
        return (group - self._first) // self._groups_per_step
