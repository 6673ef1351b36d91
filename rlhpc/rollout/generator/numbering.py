"""Numbers of samples, which with the step and the prompt seed the sampling of a group."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.data.prompts import PromptSet
from rlhpc.rollout.requests import first_samples


class Numbering:
    """Number of the earlier samples of each group's prompt, in its step.

    Without a filter, the groups of a step are ``groups_per_step`` in a row, from ``origin`` on: a group has the numbers
    that it would have if all ranks generated. With a filter (``groups_per_step`` None), which step a group belongs to
    is known only later: samples of a prompt count from the beginning of the run.
    """

    def __init__(
        self, prompts: PromptSet, seed: int, count: int, *, origin: int = 0, groups_per_step: int | None = None
    ) -> None:
        """``count``: samples of a group."""
        self._prompts, self._seed, self._count = prompts, seed, count
        self._origin, self._groups_per_step = origin, groups_per_step
        self._steps: dict[int, Sequence[int]] = {}  # by the first group of a step

    def first_sample(self, number: int) -> int:
        """That of a group; asked for in the order of the groups."""
        size = self._groups_per_step
        if size is None:
            return self._count * self._prompts.times_before(number)
        place = (number - self._origin) % size
        first = number - place
        if first not in self._steps:
            prompts, _ = self._prompts.take(first, size, self._seed)
            self._steps = {first: first_samples([prompt.prompt_id for prompt in prompts], self._count)}
        return self._steps[first][place]
