"""Attempts of a run: a record at the start of each, a verdict at its end, and its seconds outside of steps.

The number of the newest attempt is also a fence. Ranks of an earlier one that could not be ended, behind a network cut
for example, see that they were superseded, and the folder that they write to has been renamed: see ``begin``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time
import uuid
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from rlhpc.core.files import LineFile, make_folder, names_in, read_json, write_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.records import read_records
from rlhpc.core.redaction import redact
from rlhpc.core.storage import patiently

Cause = Literal[
    "finished",
    "user",
    "data",
    "non_finite",
    "gpu_memory",
    "cpu_memory",
    "network",
    "stranger",
    "bad_node",
    "hang",
    "disk_full",
    "storage",
    "crash",
    "launch",
    "allocation_lost",
    "time_limit",
    "preempted",
    "stopped",
    "requeued",
    "ended",
]
Action = Literal["none", "retry", "requeue", "stop"]


@dataclass(frozen=True)
class Attempt:
    """Record of an attempt. ``job_id``: empty for a run on this machine; ``saved_step``: that of the newest checkpoint
    at the start, -1 for none; ``hang_timeout_seconds``: time without progress that is a hang; ``storage_wait_seconds``:
    maximum wait of ranks for a failing file system; ``overrides`` (KEY=VALUE) and ``excluded`` nodes: changes by
    recovery so far."""

    number: int
    job_id: str
    restart_count: int
    nodes: tuple[str, ...]
    world_size: int
    started: float
    saved_step: int
    hang_timeout_seconds: float = 1800.0
    storage_wait_seconds: float = 300.0
    overrides: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """End of an attempt: its cause, rank (-1: none in particular) and node, and the action taken.

    ``overrides`` and ``excluded``: those of the next attempt; ``failures``: consecutive ones so far.
    """

    time: float
    cause: Cause
    message: str
    action: Action
    rank: int = -1
    node: str = ""
    detail: str = ""
    wait_seconds: float = 0.0
    overrides: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    failures: int = 0


@dataclass(frozen=True)
class Best:
    """The best checkpoint: its step, and its value of the metric in checkpoint.keep_best."""

    step: int
    metric: str
    value: float


def begin(run: RunFolder, **known: object) -> AttemptFolder:
    """Makes the folder of a new attempt, fences off all earlier ones, and writes its record. ``known``: fields of the
    record but ``number`` and ``started``.

    Earlier ranks write checkpoints under ``checkpoints/.writing-NNNN`` only, and rename them when whole; with that
    folder renamed away, in one step of the file system, their next write or rename fails.
    """
    run.create()
    folder = _next(run)
    for part in (folder.exits, folder.logs, folder.heartbeats):
        make_folder(part)
    _fence_off(folder)
    attempt = Attempt(number=folder.number, started=time.time(), **known)  # type: ignore[arg-type]
    write_json(folder.record, asdict(attempt))
    return folder


def begin_again(folder: AttemptFolder, verdict: Verdict) -> None:
    """Fences off the ranks that write, as for a new attempt: they are started again in this one, while its engines
    stay. ``verdict``: on how they have ended."""
    _fence_off(folder)
    LineFile(folder.restarts).append(json.dumps(asdict(_redacted(verdict))) + "\n")


def restarts(folder: AttemptFolder) -> list[Verdict]:
    """Verdicts on ranks that were started again within the attempt, oldest first."""
    return [Verdict(**_tuples(each)) for each in read_records(folder.restarts)]


def trainers_since(folder: AttemptFolder) -> float:
    """Unix time since which an attempt has its present trainers, or is about to have them."""
    again, attempt = restarts(folder), read_attempt(folder)
    if again:
        return again[-1].time
    return attempt.started if attempt is not None else time.time()


def next_attempt(run: RunFolder) -> AttemptFolder:
    """Folder that the next attempt will have, if no other launcher takes its number."""
    return run.attempt(max((folder.number for folder in folders(run)), default=0) + 1)


def saved_step(run: RunFolder) -> int:
    """Step of the newest checkpoint, -1 without any."""
    return max(saved_steps(run), default=-1)


def saved_steps(run: RunFolder) -> tuple[int, ...]:
    """Steps of all checkpoints. By name only: a checkpoint gets its name when it is complete."""
    return tuple(sorted(int(name.removeprefix("step-")) for name in names_in(run.checkpoints, "step-*")))


def saved_in_arrival_order(run: RunFolder) -> bool:
    """True if the newest checkpoint is of a run whose groups are trained on in the order of their arrival."""
    for name in names_in(run.checkpoints, "step-*")[-1:]:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            return read_json(run.checkpoints / name / "state.json")["state"].get("arrival") is not None
    return False


def exported_steps(run: RunFolder) -> tuple[int, ...]:
    """Steps whose weights are exported as HuggingFace folders. By name only: a folder gets it when it is complete."""
    found = (name.removeprefix("hf-") for name in names_in(run.checkpoints, "hf-*"))
    return tuple(sorted(int(step) for step in found if step.isdecimal()))


def export_folder(run: RunFolder, step: int) -> Path:
    """Folder of a step's export, beside its checkpoint."""
    return run.checkpoints / f"hf-{step:08d}"


def saved_best(run: RunFolder) -> Best | None:
    """The best checkpoint as of the newest one; None without checkpoint.keep_best, or before a validation."""
    for name in reversed(names_in(run.checkpoints, "step-*")):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            state = read_json(run.checkpoints / name / "state.json")["state"]
            if state.get("best_step", -1) < 0:
                return None
            return Best(state["best_step"], state["best_of"].partition(" ")[2], state["best_value"])
    return None


def end(folder: AttemptFolder, verdict: Verdict) -> None:
    """Writes the verdict, without secrets; the last one counts."""
    write_json(folder.verdict, asdict(_redacted(verdict)))


def _redacted(verdict: Verdict) -> Verdict:
    return replace(verdict, message=redact(verdict.message), detail=redact(verdict.detail))


def folders(run: RunFolder) -> list[AttemptFolder]:
    """All attempts, oldest first."""
    return [AttemptFolder(run.attempts / name) for name in names_in(run.attempts) if name.isdecimal()]


def read_attempt(folder: AttemptFolder) -> Attempt | None:
    """The record; None if the attempt ended before it was written."""
    try:
        fields = read_json(folder.record)
    except FileNotFoundError:
        return None
    return Attempt(**_tuples(fields))


def read_verdict(folder: AttemptFolder) -> Verdict | None:
    """The verdict; None while the ranks run, or if no supervisor was left to write it."""
    try:
        fields = read_json(folder.verdict)
    except FileNotFoundError:
        return None
    return Verdict(**_tuples(fields))


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _next(run: RunFolder) -> AttemptFolder:
    """Folder of a number that no other launcher took: mkdir is atomic, on network file systems too.

    A mkdir that reported an error may have taken effect. Its number is skipped, because the folder may be another
    launcher's.
    """
    folder = next_attempt(run)
    while True:
        try:
            patiently(folder.path.mkdir, folder.path)
        except FileExistsError:
            folder = run.attempt(folder.number + 1)
        else:
            return folder


def _fence_off(folder: AttemptFolder) -> None:
    """Gives the ranks of an attempt that are started next a folder to write in, and takes away all others."""
    checkpoints = folder.run.checkpoints
    for old in names_in(checkpoints, ".writing-*"):
        patiently(functools.partial(_discard, checkpoints / old), checkpoints / old)
    for trash in names_in(checkpoints, ".trash-*"):
        shutil.rmtree(checkpoints / trash, ignore_errors=True)
    make_folder(checkpoints / f".writing-{folder.path.name}")


def _discard(writing: Path) -> None:
    """Renames the folder in which an earlier attempt writes, unless an earlier try has."""
    with contextlib.suppress(FileNotFoundError):
        writing.rename(writing.with_name(f".trash-{uuid.uuid4().hex}"))


@dataclass(frozen=True)
class AttemptTimes:
    """``start``: from the start of the ranks until the first step may begin, without ``models``, reading the weights of
    all models, and ``resume``, reading the checkpoint (None without one). ``saves``: checkpoints that training waited
    for until they were written."""

    start: float
    models: float
    resume: float | None = None
    saves: tuple[float, ...] = ()


def write_times(folder: AttemptFolder, times: AttemptTimes) -> None:
    write_json(folder.times, asdict(times))


def read_times(folder: AttemptFolder) -> AttemptTimes | None:
    """Returns None for an attempt that did not reach its first step, or whose file is not one."""
    try:
        found = read_json(folder.times)
        resume = found["resume"]
        times = AttemptTimes(
            _seconds(found["start"]),
            _seconds(found["models"]),
            None if resume is None else _seconds(resume),
            tuple(map(_seconds, found["saves"])),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return times


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a time")
    return float(value)
