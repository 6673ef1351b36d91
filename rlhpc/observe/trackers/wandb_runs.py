"""A run of Weights & Biases: files in the run folder, or the server."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.observe import WandbSection
from rlhpc.core import env
from rlhpc.core.files import make_folder, names_in
from rlhpc.observe.trackers.protocol import PHASES, MetricsPoint, Outcome, Position, TrackedRun

_HEADER, _MAGIC, _START = struct.Struct("<IHB"), b":W&B", 7
_BLOCK = 32768
_FULL, _LAST = 1, 4  # kinds of a part that ends a record


def histories(path: Path) -> Iterator[dict[str, Any]]:
    """Rows that were logged, as far as a killed process has written them."""
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        return
    at, parts = _START, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:  # filled with zeros
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        begin = at + _HEADER.size
        at = begin + size
        if kind == 0 or at > len(data):
            return
        parts += data[begin:at]
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)
            parts = b""


# W&B records nothing by itself: neither the machine, the command line, the repository with its URL, nor the output.
_SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
_NAMED_SECONDS = 1.1  # in which two folders may get the same name


class Wandb:
    """The W&B run with the id of our run.

    W&B drops steps that go back, and starts a new file whenever an offline run is opened again: the files are read to
    find the newest step. The charts' axis is the step of each phase.
    """

    def __init__(self, run: TrackedRun, section: WandbSection) -> None:
        if "wandb" not in sys.modules:  # a service of another process may be gone, or be left with our run
            os.environ.pop(env.WANDB_SERVICE, None)
        import wandb

        folder = run.folder.trackers.files(section.name)
        make_folder(folder)
        offline = section.mode == "offline"
        self._newest = _newest_in(folder) if offline else None
        _wait_for_another_name(folder)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group,
            tags=section.tags,
            id=run.id,
            name=run.name,
            dir=str(folder),
            mode=section.mode,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**_SETTINGS),
        )
        if not offline:
            self._newest = _newest_of([dict(self._run.summary)])
        for phase in PHASES:
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def newest(self) -> Position | None:
        """The newest step of the files, or of the server."""
        return self._newest

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Logs steps, each as a row that no later one is added to."""
        for point in points:
            row = {**point.metrics, f"{point.phase}/step": point.step}
            self._run.log(row, step=row_of(point), commit=True)

    def attach(self, settings: Mapping[str, str], files: Sequence[Path]) -> None:
        """Sets the run's config, and copies files to those that W&B uploads."""
        self._run.config.update(dict(settings), allow_val_change=True)
        for file in files:
            copy = Path(self._run.dir, file.name)
            shutil.copyfile(file, copy)
            self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def close(self, outcome: Outcome) -> None:
        """Ends the run; a later one with its id continues it."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def row_of(point: MetricsPoint) -> int:
    """Row of a step, which must grow: the first validation comes after the last supervised step."""
    return point.place + (point.phase != PHASES[0])


def files_of(folder: Path) -> list[Path]:
    """Folders that `wandb sync` takes, in the order of their starts."""
    return [folder / "wandb" / name for name in names_in(folder / "wandb", "offline-run-*")]


def _wait_for_another_name(folder: Path) -> None:
    """Waits up to a second: W&B names a run's folder by the second of its start, and would write over another one."""
    started = max((os.stat(run).st_ctime for run in files_of(folder)), default=0.0)
    time.sleep(min(max(0.0, started + _NAMED_SECONDS - time.time()), _NAMED_SECONDS))


def _newest_in(folder: Path) -> Position | None:
    """The newest step of all files of a tracker."""
    found = [file for run in files_of(folder) for file in run.glob("*.wandb")]
    return max((newest for file in found if (newest := _newest_of(histories(file))) is not None), default=None)


def _newest_of(rows: Any) -> Position | None:
    steps = ((place, row.get(f"{phase}/step")) for row in rows for place, phase in enumerate(PHASES))
    return max(((place, int(step)) for place, step in steps if step is not None), default=None)
