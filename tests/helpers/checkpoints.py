"""Checkpoint folders of tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rlhpc.core.attempts import begin
from rlhpc.core.folder import AttemptFolder, RunFolder


def begin_attempt(folder: Path) -> AttemptFolder:
    return begin(RunFolder(folder), job_id="", restart_count=0, nodes=("here",), world_size=1, saved_step=-1)


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return write


def message_of(call: Callable[[], Any]) -> str:
    """Error of the call, as its user reads it."""
    try:
        call()
    except Exception as error:
        return str(error) if type(error).__name__ == "UserError" else f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def failing_fsync(folder: Path, names: Collection[str], times: int) -> Iterator[Callable[[], list[str]]]:
    """EIO from the first fsyncs of files with these parts of names, which empties them.

    The value lists the parts that failed. They are counted in ``folder``: writers are forked from the ranks.
    """
    real = os.fsync

    def fsync(descriptor: int) -> None:
        file = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        name = next((name for name in names if name in file), None)
        if name is not None:
            count = folder / name
            if len(count.read_text() if count.exists() else "") < times:
                with open(count, "a") as stream:
                    stream.write("x")
                os.truncate(f"/proc/self/fd/{descriptor}", 0)
                raise OSError(5, os.strerror(5))
        real(descriptor)

    os.fsync = fsync
    try:
        yield lambda: sorted(file.name for file in folder.iterdir())
    finally:
        os.fsync = real
