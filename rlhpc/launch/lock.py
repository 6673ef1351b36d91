"""One launcher in a run folder at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder


@contextmanager
def locked(folder: RunFolder, wait: bool = False) -> Iterator[None]:
    """Keep other launchers out of the folder, which exists; the lock goes with this process.

    Raises UserError where another one has it, unless it is to ``wait``.
    """
    with open(folder.lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(
                f"another rlhpc is running in {str(folder.path)!r}",
                where="run_dir",
                remedy="wait for it, or choose another folder with --run-dir",
            ) from None
        yield


def is_locked(folder: RunFolder) -> bool:
    """Whether a launcher is at work in the folder."""
    try:
        with open(folder.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
