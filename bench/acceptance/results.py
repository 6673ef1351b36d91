"""Values of acceptance: parts, their figures with goals, and the JSON document of all results. Torch-free."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field, field_validator
from pydantic.dataclasses import dataclass as checked

from bench.acceptance.machine import Fingerprint
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_text, write_atomic

Tier = Literal["first", "rest"]
Size = Literal["full", "tiny"]  # tiny: the same flow on any machine, a CPU too
Status = Literal["running", "passed", "failed", "timeout", "interrupted", "skipped"]
STATE = "acceptance.json"  # in the folder of results
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
_DESCRIBED = ConfigDict(use_attribute_docstrings=True)


@checked(frozen=True)
class Goal:
    """Limit of a figure: ``value <op> limit`` must hold."""

    op: Literal["<", "<=", ">", ">=", "=="]
    limit: bool | float

    def __str__(self) -> str:
        return f"{self.op} {self.limit if isinstance(self.limit, bool) else format(self.limit, 'g')}"


IS_TRUE = Goal("==", limit=True)


@checked(frozen=True, config=_DESCRIBED)
class Figure:
    """One measured value."""

    name: str
    """Name, unique within its part, such as "8b: write"."""
    value: bool | float | str
    """Measured value; text for a number that is not finite, which JSON cannot express."""
    unit: str = ""
    goal: Goal | None = None
    note: str = ""

    @field_validator("value", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> bool | float | str:
        value = value.item() if hasattr(value, "item") else value  # of numpy and torch
        return value if isinstance(value, bool | str) else float(value) if math.isfinite(value) else str(value)

    def of(self, case: str) -> Figure:
        """The same as a figure of a case."""
        return replace(self, name=f"{case}: {self.name}")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def met(self) -> bool | None:
        """True if the goal is met; null without a goal. NaN never meets one."""
        return None if self.goal is None else _OPERATORS[self.goal.op](float(self.value), self.goal.limit)


@checked(frozen=True)
class Skipped:
    """Name of a case that this machine cannot run, and the reason."""

    name: str
    reason: str


Report = Callable[[Figure | Skipped], None]


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
    needs_gpu: bool = False


@dataclass
class Context:
    """Argument of a part's function: its own folder, the size of its cases, and where results go.

    Results are written as they arrive, so those before a crash or a timeout are saved.
    """

    folder: Path
    size: Size
    on_gpu: bool
    report: Report
    log: Callable[[str], None] = field(default=print)

    @property
    def tiny(self) -> bool:
        """True if cases are cut down to seconds on a CPU."""
        return self.size == "tiny"

    @property
    def dtype(self) -> str:
        """bfloat16 on a GPU, as in production; float32 on a CPU, so that rounding hides no difference."""
        return "bfloat16" if self.on_gpu else "float32"


class PartRecord(BaseModel):
    """Result of one part; partial while its status is running."""

    model_config = _DESCRIBED

    title: str
    tier: Tier
    size: Size
    machine: str
    """Key in machines."""
    status: Status
    message: str = ""
    """Reason that it did not pass."""
    started: float
    """Start time, seconds since 1970."""
    seconds: float = 0.0
    """Wall time, including imports."""
    limit_minutes: float
    figures: list[Figure] = []
    skipped: list[Skipped] = []
    tail: list[str] = []
    """Last lines of output, if it did not pass."""

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "timeout")

    @property
    def missed(self) -> list[Figure]:
        """Figures that missed their goals."""
        return [figure for figure in self.figures if figure.met is False]

    def add(self, figure: Figure) -> None:
        """Add a figure, replacing an earlier one of the same name."""
        names = [known.name for known in self.figures]
        place = names.index(figure.name) if figure.name in names else len(names)
        self.figures[place : place + 1] = [figure]


class Results(BaseModel):
    """State and results; a later invocation with this file resumes."""

    model_config = _DESCRIBED

    schema_version: Literal[1] = 1
    machines: dict[str, Fingerprint] = {}
    """Machines that ran a part."""
    parts: dict[str, PartRecord] = {}
    """Parts by name, in the order of their first run."""
    page: str = ""
    """File name of the page for these results."""


def read_results(file: Path) -> Results:
    """The state in ``file``; empty if there is none. Raises UserError for any other file."""
    try:
        return Results.model_validate_json(read_text(file))
    except FileNotFoundError:
        return Results()
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, detail["loc"]))
        remedy = "restore the file, or give another folder"
        raise UserError(f"{key or 'no state'}: {detail['msg']}", where=str(file), remedy=remedy) from None


def write_results(file: Path, results: Results) -> None:
    """Write the state atomically, so that readers always see a complete document."""
    write_atomic(file, results.model_dump_json(indent=2) + "\n")


def json_schema() -> str:
    """JSON schema of the document."""
    schema = Results.model_json_schema(mode="serialization")
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **schema}, indent=2, ensure_ascii=False) + "\n"
