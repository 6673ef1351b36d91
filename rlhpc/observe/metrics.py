"""Metrics of every step on disk, and the clock of a step's phases."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhpc.api import RunState
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder

Record = dict[str, Any]


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, and to TensorBoard if asked.

    A run that resumes takes steps again that were done after its checkpoint: what ``state`` does not know of is cut
    from metrics.jsonl and samples.jsonl first, so that each step is there once.
    """

    def __init__(self, folder: RunFolder, tensorboard: bool, state: RunState) -> None:
        _cut(folder.metrics, lambda record: _is_done(record["phase"], record["step"], state))
        _cut(folder.samples, lambda record: _is_done("rl", record["step"], state))
        self._sft_steps = state.sft_step
        self._board = _open_board(folder.tensorboard, state.total_steps) if tensorboard else None
        self._file = open(folder.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, phase: str, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of ``step`` of ``total_steps`` in ``phase`` ("sft" or "rl"); on disk when it returns."""
        record = {"phase": phase, "step": step, "total_steps": total_steps, "time": time.time(), **metrics}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if phase == "sft":
            self._sft_steps = step
        if self._board is not None:
            # One axis for both phases: RL goes on where the supervised steps end.
            place = step if phase == "sft" else self._sft_steps + step
            for name, value in metrics.items():
                self._board.add_scalar(f"{phase}/{name}", value, place)

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


class Stopwatch:
    """Seconds of a step's phases: ``with clock("rollout"): …``; a phase entered twice is summed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = _now()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + _now() - began

    def metrics(self) -> dict[str, float]:
        """``perf/<phase>_seconds`` of every phase."""
        return {f"perf/{phase}_seconds": seconds for phase, seconds in self._seconds.items()}


def read_records(path: Path) -> list[Record]:
    """The JSON objects of a .jsonl file; none if it is absent. A last line cut short by a crash is left out."""
    if not path.is_file():
        return []
    # Not splitlines(), which breaks at characters that JSON leaves as they are, such as U+2028.
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _cut(path: Path, keep: Callable[[Record], bool]) -> None:
    if path.is_file():
        write_atomic(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in read_records(path) if keep(r)))


def _is_done(phase: str, step: int, state: RunState) -> bool:
    """The state is past the record. RL's step 0, the first validation, is made anew as long as step 1 is not done."""
    return step <= state.sft_step if phase == "sft" else 0 < state.step >= step


def _open_board(folder: Path, total_steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"TensorBoard cannot be imported ({error})",
            where="observe.tensorboard",
            remedy="pip install tensorboard, or set it to false",
        ) from None
    # Points of steps that are taken again are hidden.
    return SummaryWriter(str(folder), purge_step=total_steps + 1 if total_steps else None)


def _now() -> float:
    """The time when the device has done what it was given, so that a phase is charged for its own work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
