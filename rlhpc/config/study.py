"""The file ``study.yaml``: keys that a study searches, its objective and its budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from rlhpc.config import yaml12
from rlhpc.config.section import FileName, NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhpc.core.errors import UserError, UserErrors, did_you_mean
from rlhpc.core.inputs import read_input

_FORMER = {"segments": "end weak trials by `pruner: {name: SuccessiveHalvingPruner}`"}
Scalar = bool | int | float | str | None
NO_PRUNER = "NopPruner"
Goal = Literal["maximize", "minimize"]


class Parameter(Section):
    """Values of one key of the configuration: a range, or choices."""

    low: int | float | None = None
    """Smallest value. With whole numbers for both ends, so are all values."""
    high: int | float | None = None
    """Largest value."""
    log: bool = False
    """Sampling of equal ratios with equal probability, as for a learning rate."""
    step: int | float | None = None
    """Distance between values; default: 1 for whole numbers, none for others."""
    choices: Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=1000)] | None = None
    """Values in place of a range."""
    when: dict[str, Scalar | tuple[Scalar, ...]] = {}
    """Other keys of the search, with the value or values at which this key is set; at others the base's value holds."""

    @model_validator(mode="after")
    def _check(self) -> Parameter:
        ends = self.low is not None, self.high is not None
        if (self.choices is None) != all(ends) or any(ends) != all(ends):
            raise ValueError("needs either choices, or low and high")
        if self.choices is not None and (self.log or self.step is not None):
            raise ValueError("log and step are of a range, not of choices")
        if self.low is not None and self.high is not None:
            if self.low > self.high:
                raise ValueError(f"low = {self.low} is above high = {self.high}")
            if self.log and (self.low <= 0 or self.step is not None):
                raise ValueError("log needs low above 0, and no step")
            if self.step is not None and (self.step <= 0 or (self.whole and not isinstance(self.step, int))):
                raise ValueError("step must be above 0, and whole between whole numbers")
        return self

    @property
    def whole(self) -> bool:
        """True if all values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class ObjectiveSection(Section):
    """The one number by which runs are compared."""

    metric: str = "validation/reward_mean"
    """Name of a metric of RL steps (docs/metrics.md)."""
    goal: Goal = "maximize"
    """Direction of better values."""
    last: PositiveInt = 1
    """Number of its last values, whose mean counts."""
    best: bool = False
    """Use of its best value in place of its last ones."""

    @model_validator(mode="after")
    def _check(self) -> ObjectiveSection:
        if self.best and self.last != 1:
            raise ValueError("best contradicts last")
        return self

    @property
    def words(self) -> str:
        """The number, in words."""
        if self.best:
            return f"{self.metric}, its best value"
        return f"{self.metric}, its last value" if self.last == 1 else f"{self.metric}, mean of its last {self.last}"

    def of(self, values: Sequence[float]) -> float:
        """The number of a run with these values of the metric, of which there are enough."""
        if self.best:
            return max(values) if self.goal == "maximize" else min(values)
        return fmean(values[-self.last :])


class OptunaClass(Section):
    """A class of Optuna, with arguments of its constructor."""

    name: str
    """Name of the class, as in Optuna's documentation."""
    arguments: dict[str, Any] = {}
    """Arguments of its constructor, by name."""


class BudgetSection(Section):
    """Bounds on the cost of a study. At the end of any of these no trial starts, and those that run are cancelled; with
    trials alone they are awaited."""

    trials: PositiveInt
    """Number of trials; settings that cannot work cost none."""
    at_once: PositiveInt = 4
    """Maximum number of jobs at one time."""
    gpu_hours: PositiveFloat | None = None
    """Maximum GPU-hours of all trials, starts and lost attempts included; on CPUs, hours of ranks."""
    hours: PositiveFloat | None = None
    """Maximum hours since the study's beginning."""


class StudyFile(Section):
    """A study."""

    name: FileName
    """Name of the study; its trials are NAME-0, NAME-1, …"""
    base: Path
    """Path to the configuration that trials differ from."""
    folder: Path | None = None
    """Folder of the study; default: runs/NAME."""
    space: dict[str, Parameter] = Field(min_length=1)
    """Keys of the configuration that are searched, as in ``actor.optimizer.learning_rate``."""
    objective: ObjectiveSection = ObjectiveSection()
    """Objective of the search."""
    sampler: OptunaClass = OptunaClass(name="TPESampler")
    """Choice of settings."""
    pruner: OptunaClass = OptunaClass(name=NO_PRUNER)
    """Early end of a trial, by its objective so far."""
    budget: BudgetSection
    """Bounds at which the study ends."""
    retries: NonNegativeInt = 1
    """Number of further submissions of a trial after a fault of the cluster that its own job's retries did not help."""
    seed: NonNegativeInt = 0
    """Seed of the sampler. That of the trials is in the base."""

    @model_validator(mode="after")
    def _check(self) -> StudyFile:
        for key, parameter in self.space.items():
            for other in parameter.when:
                if other == key or other not in self.space:
                    raise ValueError(f"space.{key}.when names {other}, which is not another key of the search")
        if len(self.in_order) < len(self.space):
            raise ValueError("conditions of the space depend on each other in a circle")
        return self

    @property
    def in_order(self) -> list[str]:
        """Keys of the space after those that their conditions name."""
        found: list[str] = []
        while ready := [key for key, p in self.space.items() if key not in found and p.when.keys() <= {*found}]:
            found += ready
        return found

    @property
    def path(self) -> Path:
        """Folder of the study."""
        return self.folder or Path("runs") / self.name


def load_study(path: Path) -> StudyFile:
    """The study in a YAML file. Raises UserError with all errors, each with file, line and key."""
    try:
        text = read_input(path, piped=True).decode()
    except FileNotFoundError:
        raise UserError("no such file", where=str(path), remedy="give the path of a study (docs/studies.md)") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot be read ({error})", where=str(path), remedy="give a YAML file") from None
    document = yaml12.read(text, str(path))
    try:
        return StudyFile.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        found = [_fault(path, document.lines, each) for each in error.errors(include_url=False)]
        raise found[0] if len(found) == 1 else UserErrors(found) from None


def _fault(path: Path, lines: dict[str, int], detail: Any) -> UserError:
    names = [str(part) for part in detail["loc"]]
    keys = [".".join(names[:count]) for count in range(len(names), 0, -1)]
    known = next((key for key in keys if key in lines), "")
    place = f"{path}:{lines[known]}" if known else str(path)
    where = f"{place}: {'.'.join(names)}" if names else place
    if detail["type"] == "missing":
        return UserError("is missing", where=where, remedy="add it")
    if detail["type"] == "extra_forbidden":
        near = StudyFile.model_fields if len(names) == 1 else ()
        remedy = did_you_mean(names[-1], near) if near else "leave it out"
        return UserError("unknown key", where=where, remedy=_FORMER.get(names[0], remedy))
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(detail["input"], dict | list) else f"{detail['input']!r}: "
    return UserError(f"{shown}{message[:1].lower()}{message[1:]}", where=where, remedy="see docs/studies.md")
