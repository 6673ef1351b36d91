"""Files of a run's steps: metrics, timeline and histograms; and the clock that measures the phases of a step."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch

from rlhpc.api import RunState
from rlhpc.core import spans
from rlhpc.core.files import LineFile, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import Histogram, StepHistograms, interval
from rlhpc.core.records import PHASES, Position, Record, is_step, position, read_records
from rlhpc.core.spans import StepTimeline, read_timelines
from rlhpc.core.storage import exists
from rlhpc.parallel.waits import settle_waits


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, from which trackers are fed (rlhpc.observe.trackers).

    A resumed run repeats the steps after its checkpoint: records of steps beyond ``state`` are first removed from
    metrics.jsonl, samples.jsonl and histograms.jsonl, so that each step has one record.
    """

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        validated = state.step if state.validated_step is None else state.validated_step
        _cut(folder.metrics, _reached(state))
        _cut(folder.samples, _reached(replace(state, step=validated)), phase="rl")
        _cut(folder.histograms, _reached(state))
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

    def leave(self) -> None:
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
                hook.leave()

    def metrics(self) -> dict[str, float]:
        """``perf/<phase>_seconds`` of every phase."""
        return {f"perf/{phase}_seconds": seconds for phase, seconds in self._seconds.items()}


def _reached(state: RunState) -> Position:
    """The last step of the state. RL's step 0, the first validation, is repeated until step 1 is done."""
    return (PHASES.index("rl"), state.step) if state.step else (PHASES.index("sft"), state.sft_step)


def _cut(path: Path, last: Position, **phase: str) -> None:
    """Removes the records of steps after ``last``. ``phase`` is that of records that do not name it."""
    if exists(path):
        steps = [(record, {**phase, **record}) for record in read_records(path)]
        done = [record for record, named in steps if is_step(named) and position(named) <= last]
        write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in done))


def finish_device_work() -> None:
    """Waits until the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _now() -> float:
    """Time after the device has finished its queued work, so that a phase is charged for its own work."""
    finish_device_work()
    return time.perf_counter()


KEPT_STEPS = 200  # newest steps: a slow rank is looked for in these, and metrics.jsonl has numbers of all steps
_MOST_BYTES = 64 * 2**20
_WRITE_SECONDS = 2.0  # between two writes, at least: short steps are written together


class TimelineFile:
    """Appends one line per step, those of short steps together. Beyond twice the ``steps`` to keep, or 64 MiB, older
    ones are removed."""

    def __init__(self, path: Path, state: RunState, steps: int = KEPT_STEPS) -> None:
        """Removes steps beyond ``state``, which a resumed run repeats."""
        self._path, self._steps, self._written = path, steps, time.monotonic()
        self._unwritten: list[str] = []
        self._lines = [known.line() for known in read_timelines(path) if known.position <= _reached(state)]
        self._rewrite()

    def add(self, timeline: StepTimeline) -> None:
        """Appends a step."""
        line = timeline.line()
        self._lines.append(line)
        self._bytes += len(line)
        self._unwritten.append(line)
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes the steps that are not written yet."""
        self._written = time.monotonic()
        if len(self._lines) > 2 * self._steps or self._bytes > _MOST_BYTES:
            self._rewrite()
        elif self._unwritten:
            self._file.append("".join(self._unwritten))
            self._unwritten = []

    def _rewrite(self) -> None:
        """Keeps the newest lines, in half of the space at most."""
        kept, size = [], 0
        for line in reversed(self._lines[-self._steps :]):
            size += len(line)
            if size > _MOST_BYTES // 2:
                break
            kept.append(line)
        self._lines = kept[::-1]
        self._bytes = sum(map(len, self._lines))
        if self._lines or self._path.exists():
            write_atomic(self._path, "".join(self._lines))
        self._file, self._unwritten = LineFile(self._path), []


BINS = 30
_MOST_VALUES = 100_000  # that are binned
_LARGEST = 1e300  # magnitude that is binned: the range of all values is finite
_NARROWEST = 1e-6  # range of all bins, over the values' magnitude


def binned(parts: Sequence[np.ndarray]) -> Histogram | None:
    """Histogram of the finite values of all parts; None without any. Of very many values, every n-th is binned."""
    total = sum(len(part) for part in parts)
    values = _every(parts, max(1, math.ceil(total / _MOST_VALUES)))
    values = values[np.abs(values) < _LARGEST]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    least = _NARROWEST * max(1.0, abs(low), abs(high))
    if high - low < least:  # as good as one value: the bins are around it
        low, high = low - least / 2, high + least / 2
    counts, _ = np.histogram(values, bins=BINS, range=(low, high))
    return Histogram(low, high, tuple(counts.tolist()), total)


def _every(parts: Sequence[np.ndarray], gap: int) -> np.ndarray:
    """Every ``gap``-th value of the parts joined end to end, without joining all of them."""
    taken, offset = [np.empty(0)], 0
    if gap == 1:
        taken += parts
    else:
        for part in parts:
            taken.append(part[offset::gap])
            offset = (offset - len(part)) % gap
    return np.concatenate(taken)


class HistogramWriter:
    """Appends the histograms of every n-th step, n such that all ``total_steps`` make at most ``most`` lines."""

    def __init__(self, file: LineFile, total_steps: int, most: int) -> None:
        self._file, self._interval = file, interval(total_steps, most)

    def is_due(self, step: int) -> bool:
        """True if the step, from 1, is written."""
        return self._interval > 0 and (step - 1) % self._interval == 0

    def write(self, step: int, histograms: Mapping[str, Histogram | None]) -> None:
        """Appends those that have values; on disk when it returns."""
        known = {name: histogram for name, histogram in histograms.items() if histogram is not None}
        record = StepHistograms(step, time.time(), known).to_json()
        self._file.append(json.dumps(record, separators=(",", ":")) + "\n")
