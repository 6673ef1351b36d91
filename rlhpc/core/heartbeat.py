"""Heartbeat of a rank, and its stacks and collectives on request.

Ranks ``touch`` a phase whenever they make progress. A thread records that periodically in the folder that all ranks and
the launcher share. When the launcher writes to the file ``dump`` there, the thread answers with the Python stacks of
all threads and the last collectives. A rank that holds the interpreter's lock in native code cannot run the thread: the
launcher sends it DUMP_SIGNAL, and faulthandler writes its stacks without the lock. That can crash a process with
running threads, so it is the last resort. A stopped process does not answer.

Files are written in place and opened for each read: over NFS a client sees a change at once, but a new or renamed file
up to a minute later.

A failing file system ends no rank here: a failed write is repeated at the next look. A rank that waits for storage
elsewhere (rlhpc.core.storage) counts as making progress, because that wait has its own limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.core import storage
from rlhpc.core.collectives import GroupState
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import node_name
from rlhpc.core.shown import show

DUMP_SIGNAL = signal.SIGURG  # ignored by processes that do not expect it, such as children of a rank; Slurm can send it
_RECORD_BYTES = 1024


@dataclass(frozen=True)
class Beat:
    """A rank's record. ``touches``: number of progress reports; ``idle``: seconds since the last one at writing.

    ``stacks`` and ``collectives``: newest requests that the rank has answered, empty without any.
    """

    rank: int
    node: str
    process: ProcessId
    main_thread: int
    touches: int = 0
    phase: str = ""
    step: int | None = None
    idle: float = 0.0
    stacks: str = ""
    collectives: str = ""
    ended: bool = False


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks.txt"


def collectives_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.collectives.json"


def dump_file(folder: Path) -> Path:
    """File with the name of the newest request; a new name makes every rank answer."""
    return folder / "dump"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The rank's record; None if there is none or it is being written. Raises OSError if it cannot be read."""
    try:
        fields = json.loads(beat_file(folder, rank).read_text(encoding="utf-8"))
        return Beat(**{**fields, "process": ProcessId(**fields["process"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def look_seconds(world_size: int) -> float:
    """Interval at which a rank looks for a request: at most a thousand looks a second for all ranks together."""
    return min(max(0.5, world_size / 1000), 10.0)


def write_seconds(world_size: int, hang_timeout_seconds: float) -> float:
    """Minimum interval between writes: two hundred a second for all ranks, and often enough for the hang watch."""
    return min(max(1.0, world_size / 200), hang_timeout_seconds / 4)


class Heartbeat:
    """Heartbeat of one rank. Call ``start`` early, before slow imports; any thread may call ``touch`` at any rate."""

    def __init__(self, folder: Path, rank: int, *, world_size: int = 1, hang_timeout_seconds: float = 1800.0) -> None:
        self._folder, self._look = folder, look_seconds(world_size)
        self._period = write_seconds(world_size, hang_timeout_seconds)
        main = threading.main_thread().ident or 0
        self._beat = Beat(rank, node_name(), ProcessId.own(), main)
        # Count, time, phase, step: replaced as a whole, so that threads need no lock.
        self._progress: tuple[int, float, str, int | None] = (0, time.monotonic(), "starting", None)
        self._recorded: tuple[int, float, str, int | None] = self._progress
        self._written = float("-inf")
        self._stacks: int | None = None
        self._waits = storage.waits()
        self._collectives: Callable[[], Sequence[GroupState]] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        """Writes the first record and starts the thread; ``touch`` of this module then belongs to this rank."""
        global _current
        with contextlib.suppress(OSError):
            self._begin()
        self._thread.start()
        _current = self
        return self

    def touch(self, phase: str, step: int | None = None) -> None:
        """Reports progress. Takes well under a microsecond and touches no file."""
        self._progress = (self._progress[0] + 1, time.monotonic(), phase, step)

    def enter(self, phase: str) -> None:
        """Names what this rank does next, such as a long import. Not progress: the limits for hangs are unaffected."""
        touches, at, _, step = self._progress
        self._progress = (touches, at, phase, step)

    @property
    def phase(self) -> str:
        """Phase of the last report."""
        return self._progress[2]

    def watch_collectives(self, last: Callable[[], Sequence[GroupState]]) -> None:
        """Sets the function that returns the last collectives of this rank."""
        self._collectives = last

    def stop(self) -> None:
        """Records that the rank is done, so that it does not count in a hang."""
        global _current
        self._end.set()
        self._thread.join(timeout=5)
        faulthandler.unregister(DUMP_SIGNAL)
        with contextlib.suppress(OSError):
            self._write(ended=True)
        _current = None

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open_stacks()
        self._write()

    def _open_stacks(self) -> None:
        """Opens the file of stacks, again if its descriptor has become stale."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_DSYNC | (os.O_TRUNC if self._stacks is None else 0)
        former, self._stacks = self._stacks, os.open(stacks_file(self._folder, self._beat.rank), flags, 0o600)
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        if former is not None:
            with contextlib.suppress(OSError):
                os.close(former)

    def _run(self) -> None:
        while not self._end.wait(self._look):
            self._note_waits()
            for act in (self._write_when_due, self._answer):
                with contextlib.suppress(OSError):
                    act()

    def _note_waits(self) -> None:
        if (waits := storage.waits()) != self._waits:
            self._waits = waits
            self.touch("waiting for storage", self._progress[3])

    def _write_when_due(self) -> None:
        if self._written == float("-inf"):
            self._begin()
        if self._progress != self._recorded and time.monotonic() - self._written >= self._period:
            self._write()

    def _write(self, **changes: Any) -> None:
        progress, now = self._progress, time.monotonic()
        touches, at, phase, step = progress
        known: dict[str, Any] = {"touches": touches, "phase": phase[:100], "step": step, "idle": round(now - at, 3)}
        beat = replace(self._beat, **known, **changes)
        text = json.dumps(asdict(beat)).encode()
        assert len(text) < _RECORD_BYTES
        _write_in_place(beat_file(self._folder, beat.rank), text.ljust(_RECORD_BYTES - 1) + b"\n")
        self._beat, self._written, self._recorded = beat, now, progress  # not before: a write that failed is still due

    def _request(self) -> str:
        try:
            return dump_file(self._folder).read_text(encoding="utf-8").strip()[:100]
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def _answer(self) -> None:
        """Answers a request, with the stacks first: the recorder of collectives might wait for a hung device."""
        request = self._request()
        if not request or request == self._beat.collectives:
            return
        with contextlib.suppress(OSError):
            self._write_stacks(_all_stacks())
        self._write(stacks=request)
        with contextlib.suppress(OSError):
            text = json.dumps([group.as_json() for group in self._last_collectives()], indent=1) + "\n"
            _write_in_place(collectives_file(self._folder, self._beat.rank), text.encode())
        self._write(collectives=request)

    def _last_collectives(self) -> Sequence[GroupState]:
        try:
            return self._collectives() if self._collectives else []
        except Exception as error:  # a report without them is better than none
            show(f"rlhpc: the last collectives are unknown: {error}", file=sys.stderr)
            return []

    def _write_stacks(self, text: bytes) -> None:
        """Writes through faulthandler's descriptor; its own output would follow.

        The file is never empty, even if the interpreter's lock is taken forever between two of these calls.
        """
        if self._stacks is None:
            return
        try:
            self._put_stacks(text)
        except OSError:
            self._open_stacks()
            self._put_stacks(text)

    def _put_stacks(self, text: bytes) -> None:
        assert self._stacks is not None
        os.pwrite(self._stacks, text, 0)
        os.ftruncate(self._stacks, len(text))
        os.lseek(self._stacks, 0, os.SEEK_END)


_current: Heartbeat | None = None


def touch(phase: str, step: int | None = None) -> None:
    """Reports progress of this process's rank, if it has a heartbeat."""
    if _current is not None:
        _current.touch(phase, step)


def enter(phase: str) -> None:
    """Names what this process's rank does next, if it has a heartbeat; see ``Heartbeat.enter``."""
    if _current is not None:
        _current.enter(phase)


def _all_stacks() -> bytes:
    """Python stacks of all threads, innermost call first."""
    with open(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _write_in_place(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, data)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
