"""Samples of training steps on disk: one Parquet file for each step that is kept, within a bound. Free of torch.

Files are written in a thread, so that a slow file system does not delay a step. A step that ends while the file of an
earlier one is still being written is left out.
"""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.files import make_folder, names_in, remove, write_atomic
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import observing
from rlhpc.core.shown import ShownOnly
from rlhpc.core.storage import BRIEF, Patience, patiently

_log = logging.getLogger(__name__)

Row = Mapping[str, Any]
PART = "reward/"  # prefix of the columns of a reward's parts
SHARE = 4  # one step's text has at most this part of the bound, so that the first and the newest are within it
_NAME = re.compile(r"step-(\d{8,})\.parquet")
_WAIT_SECONDS = 10.0  # for the last file, at the end of a run

# Columns with the names of their types in pyarrow; then come those of a reward's parts.
COLUMNS = {
    "step": "int32",
    "sample": "int32",
    "group_id": "int32",
    "prompt_id": "int64",
    "source": "string",
    "prompt": "string",
    "response": "string",
    "messages": "string",
    "expected": "string",
    "answer": "string",
    "reward": "float64",
    "correct": "bool_",
    "advantage": "float32",
    "advantage_min": "float32",
    "advantage_max": "float32",
    "prompt_length": "int32",
    "response_length": "int32",
    "trained_tokens": "int32",
    "tool_tokens": "int32",
    "turns": "int32",
    "tool_calls": "int32",
    "truncated": "bool_",
    "policy_version": "int64",
    "logprob_mean": "float32",
    "logprob_min": "float32",
    "logprob_diff_mean": "float32",
}


class SampleFiles:
    """Writes the files of a run, ``most_bytes`` together."""

    def __init__(self, attempt: AttemptFolder, most_bytes: int) -> None:
        self._attempt, self._most = attempt, most_bytes
        self._guard, self._left_out = ShownOnly("samples of training steps"), False
        self._thread: threading.Thread | None = None
        make_folder(attempt.run.training_samples)

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Begins to write the samples of a step."""
        if self._thread is not None and self._thread.is_alive():
            if not self._left_out:
                _log.warning("samples of step %d are left out: those of an earlier step are still being written", step)
            self._left_out = True
            return
        self._thread = threading.Thread(target=self._write, args=(step, rows), name="training samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the last file, but not for a file system that does not respond."""
        if self._thread is not None:
            self._thread.join(_WAIT_SECONDS)

    def _write(self, step: int, rows: Sequence[Row]) -> None:
        with self._guard, observing():
            if self._attempt.is_current(BRIEF):
                write_atomic(file_of(self._attempt.run, step), encoded(rows), BRIEF)
                _trim(self._attempt.run, self._most)


def encoded(rows: Sequence[Row]) -> bytes:
    """The rows as a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    parts = sorted({name for row in rows for name in row if name.startswith(PART)})
    types = {**COLUMNS, **dict.fromkeys(parts, "float64")}
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in types.items()])
    columns = [pyarrow.array([row.get(name) for row in rows], type=schema.field(name).type) for name in types]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def read_file(path: Path) -> list[dict[str, Any]]:
    """Samples of a file. The parts of the reward become ``parts``, the text of ``messages`` becomes a list."""
    from pyarrow import BufferReader, parquet

    data = patiently(path.read_bytes, path)
    return [_read(row) for row in parquet.ParquetFile(BufferReader(data)).read().to_pylist()]


def _read(row: dict[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in row.items() if name.startswith(PART)}
    found = {name: value for name, value in row.items() if name not in parts}
    found["parts"] = {name.removeprefix(PART): value for name, value in parts.items() if value is not None}
    found["messages"] = json.loads(row["messages"]) if row.get("messages") else None
    return found


def file_of(folder: RunFolder, step: int) -> Path:
    """File of a step's samples."""
    return folder.training_samples / f"step-{step:08d}.parquet"


def kept_steps(folder: RunFolder, patience: Patience | None = None) -> list[int]:
    """Steps whose samples are there, in order."""
    names = names_in(folder.training_samples, "step-*.parquet", patience)
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def forget_steps(folder: RunFolder, last_step: int) -> None:
    """Removes the samples of steps after ``last_step``: a resumed run takes these steps again."""
    for step in kept_steps(folder):
        if step > last_step:
            remove(file_of(folder, step))


def _trim(folder: RunFolder, most_bytes: int) -> None:
    """Removes the oldest files until the others are within the bound. The first and the newest stay."""
    steps = kept_steps(folder, BRIEF)
    sizes = {step: file_of(folder, step).stat().st_size for step in steps}
    for step in steps[1:-1]:
        if sum(sizes.values()) <= most_bytes:
            return
        remove(file_of(folder, step))
        del sizes[step]
