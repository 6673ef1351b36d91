"""Steps and numbers of samples, which with the prompt seed the sampling of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.data.prompts import PromptSet
from rlhpc.rollout.requests import first_samples


@dataclass(frozen=True)
class StepGroups:
    """Groups of the steps from ``version`` on: ``count`` in a row each, from ``first`` on."""

    version: int
    first: int
    count: int

    def place(self, number: int) -> tuple[int, int]:
        """The step of a group, and its place there."""
        steps, place = divmod(number - self.first, self.count)
        return self.version + steps, place


class Numbering:
    """A group's step, and the number of its prompt's earlier samples there.

    Without a filter they are those that the group has if all ranks generate. With a filter, in arrival order or if
    engines may be lost (``steps`` None), which step trains on a group is known only later: the version takes its place,
    and samples of a prompt count from the beginning of the run.
    """

    def __init__(self, prompts: PromptSet, seed: int, count: int, steps: StepGroups | None = None) -> None:
        """``count``: samples of a group."""
        self._prompts, self._seed, self._count, self._steps = prompts, seed, count, steps
        self._firsts: dict[int, Sequence[int]] = {}  # by the first group of a step

    def step(self, number: int, version: int) -> int:
        """The step that seeds a group which begins with ``version``."""
        return self._steps.place(number)[0] if self._steps is not None else version

    def first_sample(self, number: int) -> int:
        """That of a group; asked for in the order of the groups."""
        if self._steps is None:
            return self._count * self._prompts.times_before(number)
        _, place = self._steps.place(number)
        if number - place not in self._firsts:
            prompts, _ = self._prompts.take(number - place, self._steps.count, self._seed)
            firsts = first_samples([prompt.prompt_id for prompt in prompts], self._count)
            self._firsts = {number - place: firsts}
        return self._firsts[number - place][place]
