"""Results and state of acceptance: a JSON document, with ``--schema`` as its schema. Torch-free."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.acceptance.fingerprint import Fingerprint
from bench.acceptance.part import Figure, Part, Size, Skipped, Tier
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_text, write_atomic

SCHEMA_VERSION: Literal[1] = 1
STATE = "acceptance.json"  # in the folder of results
Status = Literal["running", "passed", "failed", "timeout", "interrupted", "skipped"]
FAILED: tuple[Status, ...] = ("failed", "timeout")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class GoalRecord(_Record):
    op: Literal["<", "<=", ">", ">=", "=="]
    limit: bool | float

    def __str__(self) -> str:
        return f"{self.op} {self.limit if isinstance(self.limit, bool) else format(self.limit, 'g')}"


class FigureRecord(_Record):
    """One measured value."""

    name: str
    """Name, unique within its part."""
    value: bool | float | str
    """Measured value; text for a number that is not finite, which JSON cannot express."""
    unit: str = ""
    goal: GoalRecord | None = None
    met: bool | None = None
    """Whether the goal is met; null without a goal."""
    note: str = ""

    @classmethod
    def of(cls, figure: Figure) -> FigureRecord:
        value = figure.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = float(value) if math.isfinite(value) else str(value)
        goal = GoalRecord(op=figure.goal.op, limit=figure.goal.limit) if figure.goal else None
        return cls(name=figure.name, value=value, unit=figure.unit, goal=goal, met=figure.met, note=figure.note)


class SkippedRecord(_Record):
    """A case that the machine cannot run."""

    name: str
    reason: str

    @classmethod
    def of(cls, skipped: Skipped) -> SkippedRecord:
        return cls(name=skipped.name, reason=skipped.reason)


class PartRecord(_Record):
    """Result of one part; partial while its status is running."""

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
    figures: list[FigureRecord] = []
    skipped: list[SkippedRecord] = []
    tail: list[str] = []
    """Last lines of output, if it did not pass."""

    @classmethod
    def begin(cls, part: Part, size: Size, machine: str, started: float) -> PartRecord:
        return cls(
            title=part.title,
            tier=part.tier,
            size=size,
            machine=machine,
            status="running",
            started=started,
            limit_minutes=part.minutes,
        )

    @property
    def failed(self) -> bool:
        return self.status in FAILED

    @property
    def missed(self) -> list[FigureRecord]:
        """Figures that missed their goals."""
        return [figure for figure in self.figures if figure.met is False]

    def add(self, figure: FigureRecord) -> None:
        """Add a figure, replacing an earlier one of the same name."""
        names = [known.name for known in self.figures]
        if figure.name in names:
            self.figures[names.index(figure.name)] = figure
        else:
            self.figures.append(figure)


class Results(_Record):
    """State and results; a later invocation with this file resumes."""

    schema_version: Literal[1] = SCHEMA_VERSION
    machines: dict[str, Fingerprint] = {}
    """Machines that ran a part."""
    parts: dict[str, PartRecord] = {}
    """Parts by name, in the order of their first run."""
    page: str = ""
    """File name of the page for these results."""


def read_results(file: Path) -> Results:
    """The state in ``file``; empty if there is none. Raises UserError for any other file."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return Results()
    remedy = "restore the file, or give another folder"
    try:
        version = json.loads(text).get("schema_version")
    except (ValueError, AttributeError):
        raise UserError("not a state of acceptance", where=str(file), remedy=remedy) from None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"schema_version is {version!r}, this release reads {SCHEMA_VERSION}", where=str(file), remedy=remedy
        )
    try:
        return Results.model_validate_json(text)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, detail["loc"]))
        raise UserError(f"{key}: {detail['msg']}", where=str(file), remedy=remedy) from None


def write_results(file: Path, results: Results) -> None:
    """Write the state atomically, so that readers always see a complete document."""
    write_atomic(file, results.model_dump_json(indent=2) + "\n")


def json_schema() -> str:
    """JSON schema of the document."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Results.model_json_schema(mode="serialization"),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
