"""Loss of engines while the trainers go on: the next phase of each, and the record of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhpc.config.jobs import RecoverySection
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import saved_in_arrival_order
from rlhpc.core.files import names_in, read_json, write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.shown import show
from rlhpc.core.storage import NONE
from rlhpc.launch.supervise.diagnosis import Diagnosis

EnginePhase = Literal["running", "waiting", "gone", "absent"]  # absent: its rollout job has not begun
_HOPELESS = ("user", "data")
_FIRST_SECONDS = 5.0  # before an engine is started again for the first time; twice as long each further time
_STEADY_SECONDS = 600.0  # after which an engine's losses so far do not count any more


@dataclass(frozen=True)
class EngineLife:
    """State of an engine. ``generation``: number of its starts before in this attempt; ``since``: Unix time of the
    phase; ``failures``: losses in a row; ``why``: of the last one; ``due``: Unix time of the next start."""

    generation: int = 0
    phase: EnginePhase = "running"
    since: float = 0.0
    failures: int = 0
    why: str = ""
    due: float = 0.0


def after_loss(
    state: EngineLife, diagnosis: Diagnosis, policy: RecoverySection, now: float, *, comes_back: bool = True
) -> EngineLife | None:
    """Next state of an engine that was lost; None if the attempt must end, because the error is repeatable.
    ``comes_back``: it can be started again in its place."""
    if diagnosis.cause in _HOPELESS:
        return None
    failures = 1 + (state.failures if now - state.since < _STEADY_SECONDS else 0)
    lost = replace(state, since=now, failures=failures, why=diagnosis.message)
    if failures > policy.retries or not comes_back:
        return replace(lost, phase="gone")
    wait = min(policy.wait_seconds, _FIRST_SECONDS * 2 ** (failures - 1))
    return replace(lost, phase="waiting", due=now + wait)


def started_again(state: EngineLife, now: float) -> EngineLife:
    """State of an engine whose ranks are started once more."""
    return replace(state, phase="running", generation=state.generation + 1, since=now)


def begun_again(state: EngineLife) -> EngineLife:
    """State of an engine of a rollout job that begins, for the first time or once more. It joins the trainers like one
    that was started again."""
    return replace(started_again(state, time.time()), failures=0, why="", due=0.0)


def after_former_losses(config: RunConfig, run: RunFolder) -> RunConfig:
    """The config of the next attempt. After a loss of an engine the newest checkpoint is in the order of arrival, and
    so is the rest of the run: its groups have left virtual time."""
    if not must_follow_arrival(config, run):
        return config
    section = config.asynchrony
    show("rlhpc: an engine was lost before the newest checkpoint: the run goes on in the order of arrival")
    return config.model_copy(update={"asynchrony": section.model_copy(update={"schedule": "arrival"})})


def must_follow_arrival(config: RunConfig, run: RunFolder) -> bool:
    """True if ranks that begin with the newest checkpoint need another schedule than the configured one."""
    if not config.may_lose_engines or config.asynchrony.schedule == "arrival":
        return False
    return saved_in_arrival_order(run)


def may_go_on(states: Sequence[EngineLife]) -> bool:
    """True if some engine generates, or will."""
    return any(state.phase != "gone" for state in states)


@dataclass(frozen=True)
class EnginesRecord:
    """Engines of an attempt, or of one of its jobs, and the number of losses."""

    engines: tuple[EngineLife, ...]
    losses: int = 0

    def write(self, file: Path, first: int = 0) -> None:
        """Replaces the record of a job. ``first``: number of its first engine."""
        write_json(file, {"first": first, **asdict(self)})


def read_engine_lives(file: Path) -> tuple[int, EnginesRecord] | None:
    """Record of a job, after the number of its first engine; None if none can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record: dict[str, Any] = read_json(file, NONE)
        lives = tuple(EngineLife(**state) for state in record["engines"])
        return int(record["first"]), EnginesRecord(lives, int(record["losses"]))
    return None


def read_engines(attempt: AttemptFolder) -> EnginesRecord | None:
    """All engines of an attempt, those of rollout jobs too; None if they cannot be lost alone."""
    try:
        names = names_in(attempt.path, "engine_losses*.json", NONE)
    except OSError:
        return None
    found = [record for name in names if (record := read_engine_lives(attempt.path / name)) is not None]
    if not found:
        return None
    engines: list[EngineLife] = []
    for first, part in sorted(found, key=lambda one: one[0]):
        engines += [EngineLife(phase="absent")] * (first - len(engines))
        engines += part.engines
    return EnginesRecord(tuple(engines), sum(record.losses for _, record in found))
