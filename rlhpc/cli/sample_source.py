"""Where ``rlhpc samples`` finds samples: of validations in samples.jsonl, of training steps in Parquet files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number
from rlhpc.launch.runs.run_registry import RunEntry, find_run
from rlhpc.observe.training_samples import file_of, kept_steps, read_file

Record = dict[str, Any]
Mark = tuple[int, int]  # a step, and a number that changes when its samples do
_REMEDIES = {
    "validation": "wait for the first validation, which needs data.validation, or add --training",
    "training": "wait for the first step; observe.training_samples must be on",
}
_FILES = "give a run, or a file of its folder training_samples"


@dataclass(frozen=True)
class Source:
    """Samples of one kind. ``path`` is their file, or None for those of ``run``."""

    kind: Literal["validation", "training"]
    path: Path | None
    run: RunEntry | None

    @property
    def _folder(self) -> RunFolder:
        assert self.run is not None
        return self.run.folder

    def file(self, step: int) -> Path:
        """File with the samples of a step."""
        if self.path is not None:
            return self.path
        return self._folder.samples if self.kind == "validation" else file_of(self._folder, step)

    def steps(self) -> list[int]:
        """Steps that have samples, in order."""
        return sorted({step for step, _ in self.marks()})

    def marks(self) -> list[Mark]:
        """The same, each with a number that changes when a resumed run writes it again."""
        if self.kind == "validation":
            counts: dict[int, int] = {}
            for record in _read_lines(self.file(0)):
                counts[record["step"]] = counts.get(record["step"], 0) + 1
            return sorted(counts.items())
        if self.path is not None:
            return sorted({(int(record["step"]), 0) for record in self._rows})
        found = []
        for step in kept_steps(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed to stay within the bound
                found.append((step, file_of(self._folder, step).stat().st_mtime_ns))
        return found

    def step(self, asked: int | None) -> int:
        """The step asked for, or the last one. Raises UserError if it has no samples."""
        there = self.steps()
        step = (there[-1] if there else 0) if asked is None else asked
        if step in there:
            return step
        if not there and self.kind == "training":
            raise _none_yet(self.kind, str(self._folder.path))
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"no samples of step {step}", where=str(self._where), remedy=f"steps with samples: {names}")

    def read(self, step: int) -> list[Record]:
        """Samples of a step, in the order that they were written in."""
        if self.kind == "validation":
            return [record for record in _read_lines(self.file(step)) if record["step"] == step]
        rows = self._rows if self.path is not None else _read_rows(file_of(self._folder, step))
        return [row for row in rows if row["step"] == step]

    @property
    def _where(self) -> Path:
        if self.path is not None or self.kind == "validation":
            return self.file(0)
        return self._folder.training_samples

    @cached_property
    def _rows(self) -> list[Record]:
        assert self.path is not None
        return _read_rows(self.path)


def find_source(text: str, *, training: bool) -> Source:
    """Samples of a file, or of a run. Raises UserError if there are none."""
    path = Path(text)
    if path.is_file():
        return Source("training" if path.suffix == ".parquet" else "validation", path, None)
    run = find_run(text)
    kind: Literal["validation", "training"] = "training" if training else "validation"
    there = run.folder.training_samples.is_dir() if training else run.folder.samples.is_file()
    if not there:
        raise _none_yet(kind, text)
    return Source(kind, None, run)


def _none_yet(kind: str, where: str) -> UserError:
    return UserError(f"no {'training ' * (kind == 'training')}samples yet", where=where, remedy=_REMEDIES[kind])


def _read_lines(file: Path) -> Iterator[Record]:
    """Records of the complete lines."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for place, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                known = _is_sample(record)
            except (ValueError, RecursionError):
                known = False
            if not known:
                raise UserError("not a sample", where=f"{file}:{place}", remedy="give a run or its samples.jsonl")
            yield record


def _is_sample(record: Any) -> bool:
    """Whether it has a step and a reward."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    return number(record.get("reward")) is not None and isinstance(record.get("parts") or {}, dict)


def _read_rows(file: Path) -> list[Record]:
    try:
        rows = read_file(file)
    except (ModuleNotFoundError, FileNotFoundError):
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(f"no file of samples ({type(error).__name__})", where=str(file), remedy=_FILES) from None
    if not all(map(_is_sample, rows)):
        raise UserError("no file of samples", where=str(file), remedy=_FILES)
    return rows
