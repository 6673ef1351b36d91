"""Values of acceptance: parts, their figures, and the goals of figures. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Tier = Literal["first", "rest"]
Size = Literal["full", "tiny"]  # tiny: the same flow on any machine, a CPU too


@dataclass(frozen=True)
class Goal:
    """Limit of a figure: ``value <op> limit`` must hold."""

    op: Literal["<", "<=", ">", ">=", "=="]
    limit: float | bool

    def met(self, value: float) -> bool:
        """Whether the value meets the goal. NaN never does."""
        comparisons: dict[str, bool] = {
            "<": value < self.limit,
            "<=": value <= self.limit,
            ">": value > self.limit,
            ">=": value >= self.limit,
            "==": value == self.limit,
        }
        return comparisons[self.op]

    def __str__(self) -> str:
        return f"{self.op} {self.limit}"


IS_TRUE = Goal("==", limit=True)


@dataclass(frozen=True)
class Figure:
    """One measured value. ``name`` is unique within its part, such as "8b: seconds"; ``unit`` may be empty."""

    name: str
    value: float | bool | str
    unit: str = ""
    goal: Goal | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None or isinstance(self.value, str):
            return None
        return self.goal.met(self.value)


@dataclass(frozen=True)
class Skipped:
    """Name of a case that this machine cannot run, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Part:
    """One part of acceptance, run in its own process.

    ``function`` is "module:name" of a ``Callable[[Context], None]``. ``minutes`` is the part's own limit, at most 8.
    ``needs_gpu`` parts are skipped by name where there is none.
    """

    name: str
    title: str
    tier: Tier
    minutes: float
    function: str
    needs_gpu: bool = True


@dataclass
class Context:
    """Argument of a part's function: its own folder, the size of its cases, and where results go.

    Results are written as they arrive, so those before a crash or a timeout are saved.
    """

    folder: Path
    size: Size
    on_gpu: bool
    report: Callable[[Figure | Skipped], None]
    log: Callable[[str], None] = field(default=print)

    @property
    def tiny(self) -> bool:
        """Whether cases are cut down to seconds on a CPU."""
        return self.size == "tiny"
