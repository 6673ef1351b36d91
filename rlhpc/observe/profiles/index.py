"""Profiles in a run folder: what there is, and what is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core.files import names_in, read_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import NONE

TRACE = ".trace.json.gz"


@dataclass(frozen=True)
class RankProfile:
    """Profile of one rank in one step. ``warnings``: what is missing, and why."""

    step: int
    rank: int
    tools: tuple[str, ...]
    phases: tuple[str, ...]
    files: tuple[Path, ...]
    bytes: int
    time: float
    warnings: tuple[str, ...] = ()

    @property
    def traces(self) -> tuple[Path, ...]:
        """Its Chrome traces."""
        return tuple(file for file in self.files if file.name.endswith(TRACE))

    def as_json(self) -> dict[str, Any]:
        """JSON value of `rlhpc profile --json`."""
        names = {"tools": list(self.tools), "phases": list(self.phases), "files": [str(file) for file in self.files]}
        known = {"step": self.step, "rank": self.rank, "time": self.time, "bytes": self.bytes}
        return {**known, **names, "warnings": list(self.warnings)}


def record_name(rank: int) -> str:
    """File name of the record of a rank's profile."""
    return f"rank-{rank:05d}.json"


def read_profiles(run: RunFolder) -> list[RankProfile]:
    """Complete profiles of a run, by step and rank."""
    found = []
    for folder in _folders(run):
        for name in names_in(folder, "rank-*.json", NONE):
            try:
                found.append(_read(folder, name))
            except (ValueError, KeyError, TypeError, FileNotFoundError):
                continue  # deleted, or being written
    return sorted(found, key=lambda one: (one.step, one.rank))


def _read(folder: Path, name: str) -> RankProfile:
    record = read_json(folder / name, NONE)
    files = tuple(folder / file for file in record["files"] if (folder / file).exists())
    size = sum(file.stat().st_size for file in files)
    tools, phases, warnings = (tuple(map(str, record[key])) for key in ("tools", "phases", "warnings"))
    return RankProfile(
        int(record["step"]), int(record["rank"]), tools, phases, files, size, float(record["time"]), warnings
    )


def prune(run: RunFolder, most_bytes: int, newest: int) -> None:
    """Deletes the oldest profiles and reports of Nsight Systems until the rest, without step ``newest``, has at most
    ``most_bytes``."""
    old = [folder for folder in _folders(run) if folder != run.profile(newest)]
    old += [run.nsys / name for name in names_in(run.nsys, patience=NONE)]
    sizes = {path: _size(path) for path in old}
    total = sum(sizes.values())
    for path in sorted(sizes, key=lambda path: path.stat().st_mtime):
        if total <= most_bytes:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        total -= sizes[path]


def _folders(run: RunFolder) -> Iterator[Path]:
    return (run.profiles / name for name in names_in(run.profiles, "step-*", NONE))


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    try:
        return sum(map(_size, path.iterdir())) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:  # deleted meanwhile
        return 0
