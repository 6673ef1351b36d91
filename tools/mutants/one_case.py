"""One case: what was changed, how the command is called, and what must come of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

COMMANDS: dict[str, tuple[str, ...]] = {
    "check": ("run", "{config}", "--check"),
    "plan": ("plan", "run", "{config}"),
    "search": ("plan", "search", "{config}"),
    "submit": ("submit", "{config}", "--dry-run"),
}
_SHARES = (35, 30, 2, 33)
RUNS = frozenset({"check", "submit"})  # commands that read weights, tokenizer and data
ALL = frozenset(COMMANDS)


@dataclass
class Case:
    """A command on a folder of its own. ``mutate`` fills in the lower fields.

    ``wrong_for``: commands that must refuse it. ``names``: texts of which a refusal must have one; empty: any will do.
    """

    number: int
    folder: Path
    family: str
    command: str
    rng: random.Random
    kind: str = ""
    what: str = ""
    names: tuple[str, ...] = ()
    wrong_for: frozenset[str] = frozenset()
    config: str = "config.yaml"
    arguments: tuple[str, ...] = ()
    locked: list[Path] = field(default_factory=list)  # folders whose mode must be restored for removal

    @property
    def wrong(self) -> bool:
        return self.command in self.wrong_for

    @property
    def words(self) -> list[str]:
        """The words of the command line after ``rlhpc``."""
        return [word.format(config=self.config) for word in COMMANDS[self.command]] + list(self.arguments)

    def changed(self, what: str, *names: str, wrong_for: frozenset[str] = frozenset()) -> None:
        """Records the change."""
        self.what, self.names, self.wrong_for = what[:200], names, wrong_for


Mutation = Callable[[Case], None]


def draw(seed: int, number: int, folder: Path, families: list[str]) -> Case:
    """The case without its mutation."""
    rng = random.Random(f"{seed}:{number}")
    (command,) = rng.choices([*COMMANDS], _SHARES)
    return Case(number, folder, rng.choice(families), command, rng)
