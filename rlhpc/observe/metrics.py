"""Writes and reads the metrics of each step; measures the phases of a step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from rlhpc.api import RunState
from rlhpc.core import spans
from rlhpc.core.files import LineFile, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record, is_step, parse_records
from rlhpc.core.storage import exists, patiently
from rlhpc.parallel.waits import settle_waits


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, from which trackers are fed (rlhpc.observe.trackers).

    A resumed run repeats the steps after its checkpoint: records of steps beyond ``state`` are first removed from
    metrics.jsonl, samples.jsonl and histograms.jsonl, so that each step has one record.
    """

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        _cut(folder.metrics, state)
        validated = state.step if state.validated_step is None else state.validated_step
        _cut(folder.samples, replace(state, step=validated), phase="rl")
        _cut(folder.histograms, state)
        self._file = LineFile(folder.metrics)

    def write(self, phase: str, step: int, total_steps: int, metrics: Mapping[str, float]) -> Record:
        """Appends the metrics of ``step`` of ``total_steps`` in ``phase`` ("sft" or "rl"); on disk when it returns."""
        record: Record = {"phase": phase, "step": step, "total_steps": total_steps, "time": time.time(), **metrics}
        self._file.append(json.dumps(record) + "\n")
        return record


class PhaseHook(Protocol):
    """Observer of the phases of a step; raises nothing."""

    def enter(self, phase: str) -> None:
        """Called before a phase."""

    def leave(self, phase: str) -> None:
        """Called after it, also if it raised."""


class Stopwatch:
    """Seconds per phase of a step: ``with clock("rollout"): …``; sums the times of a phase entered twice.

    Its phases are those of the rank's step (rlhpc.core.spans). ``hook``: profile of the present step, which sees where
    phases begin and end (rlhpc.observe.profiles).
    """

    hook: ClassVar[PhaseHook | None] = None

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if (hook := Stopwatch.hook) is not None:
            hook.enter(phase)
        core = None if torch.cuda.is_available() else spans.CoreTimes.now()
        began = _now()
        spans.enter(phase)
        try:
            yield
        finally:
            ended = _now()
            settle_waits()
            spans.leave(began, ended, spans.CoreTimes.now() - core if core is not None else None)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + ended - began
            if hook is not None:
                hook.leave(phase)

    def metrics(self) -> dict[str, float]:
        """``perf/<phase>_seconds`` of every phase."""
        return {f"perf/{phase}_seconds": seconds for phase, seconds in self._seconds.items()}


def read_records(path: Path) -> list[Record]:
    """JSON objects of a .jsonl file; none if it is absent. Skips a line truncated by a crash."""
    try:
        return parse_records(patiently(path.read_bytes, path))
    except FileNotFoundError:
        return []


def _cut(path: Path, state: RunState, **phase: str) -> None:
    """Removes the records of steps beyond the state. ``phase`` is that of records that do not name it."""
    if exists(path):
        steps = [(record, {**phase, **record}) for record in read_records(path)]
        done = [record for record, named in steps if is_step(named) and _is_done(named["phase"], named["step"], state)]
        write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in done))


def _is_done(phase: str, step: int, state: RunState) -> bool:
    """Whether the state includes the step. RL's step 0, the first validation, is repeated until step 1 is done."""
    return step <= state.sft_step if phase == "sft" else 0 < state.step >= step


def finish_device_work() -> None:
    """Waits until the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _now() -> float:
    """Time after the device has finished its queued work, so that a phase is charged for its own work."""
    finish_device_work()
    return time.perf_counter()
