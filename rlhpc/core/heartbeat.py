"""Heartbeat of a rank, and its stacks and collectives on request.

Ranks ``touch`` a phase whenever they make progress. A thread periodically sends a record of that to the job's store,
whose answer has the launcher's newest request. The thread answers a request with the Python stacks of all threads and
the last collectives, as files in the folder that all ranks and the launcher share. A rank that holds the interpreter's
lock in native code cannot run the thread: the launcher sends it DUMP_SIGNAL, and faulthandler writes its stacks without
the lock. That can crash a process with running threads, so it is the last resort. A stopped process does not answer.

A message to the store opens no file. A thousand ranks that write a record and look for a request every few seconds
would open a thousand files a second on the shared file system. The launcher writes one file for all ranks, for commands
on the run, in place: over NFS a client sees a change at once, but a new or renamed file up to a minute later.

A store that does not answer ends no rank here: the thread connects again at the next interval. A rank that waits for
storage elsewhere (rlhpc.core.storage) counts as making progress, because that wait has its own limit.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.core import storage
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import node_name
from rlhpc.core.shown import show
from rlhpc.core.store_client import Refused, StoreAddress, StoreConnection
from rlhpc.core.store_protocol import Op, ProtocolError, Status, number

# Ignored by processes that do not expect it, such as children of a rank. Slurm can send it, and Apptainer passes it on
# to the rank, whose parent it is, which SIGURG is not (internal/pkg/runtime/engine/apptainer/monitor_linux.go).
DUMP_SIGNAL = signal.SIGWINCH

_ANSWER_SECONDS = 5.0  # for the store to accept a connection or to answer


@dataclass(frozen=True)
class Beat:
    """A rank's record. ``touches``: number of progress reports; ``idle``: seconds since the last one at sending.

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


def beats_file(folder: Path) -> Path:
    """Records of all ranks as the launcher knew them, a line each."""
    return folder / "ranks.jsonl"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks.txt"


def collectives_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.collectives.json"


def parse_beat(text: str | bytes) -> Beat | None:
    """A record; None for anything else, such as half of one."""
    try:
        fields = json.loads(text)
        return Beat(**{**fields, "process": ProcessId(**fields["process"])})
    except (ValueError, TypeError, KeyError):
        return None


def write_beats(folder: Path, beats: Iterable[Beat]) -> None:
    """Writes the file of all ranks. Raises OSError."""
    lines = [json.dumps(asdict(beat)) + "\n" for beat in beats]
    write_in_place(beats_file(folder), "".join(lines).encode())


def read_beats(folder: Path) -> dict[int, Beat]:
    """Records in the file of all ranks, but lines that are being written. Raises OSError if it cannot be read."""
    found = (parse_beat(line) for line in beats_file(folder).read_bytes().splitlines())
    return {beat.rank: beat for beat in found if beat is not None}


def message_seconds(world_size: int, hang_timeout_seconds: float) -> float:
    """Interval between two messages of a rank to the store: at most 200 a second for up to 6,000 ranks, which take a
    few percent of a core there, and often enough for the hang watch."""
    return min(max(0.5, world_size / 200), 30.0, hang_timeout_seconds / 4)


class Heartbeat:
    """Heartbeat of one rank. Call ``start`` early, before slow imports; any thread may call ``touch`` at any rate.
    ``store``: the job's store; without one nothing is sent."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        world_size: int = 1,
        hang_timeout_seconds: float = 1800.0,
        store: StoreAddress | None = None,
    ) -> None:
        self._folder, self._store = folder, store
        self._every = message_seconds(world_size, hang_timeout_seconds)
        self._connection: StoreConnection | None = None
        self._beat = Beat(rank, node_name(), ProcessId.own(), threading.main_thread().ident or 0)
        # Count, time, phase, step: replaced as a whole, so that threads need no lock.
        self._progress: tuple[int, float, str, int | None] = (0, time.monotonic(), "starting", None)
        self._sent: tuple[int, float, str, int | None] | None = None
        self._stacks: int | None = None
        self._waits = storage.waits()
        self._collectives: Callable[[], Sequence[GroupState]] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        """Starts the thread; ``touch`` of this module then belongs to this rank."""
        global _current
        with contextlib.suppress(OSError):
            self._open_stacks()
        if self._store is not None:
            self._thread.start()
        _current = self
        return self

    def touch(self, phase: str, step: int | None = None) -> None:
        """Reports progress. Takes well under a microsecond and sends nothing."""
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
        """Reports that the rank is done, so that it does not count in a hang."""
        global _current
        self._end.set()
        if self._store is not None:
            self._thread.join(timeout=5)
        faulthandler.unregister(DUMP_SIGNAL)
        _current = None

    def _open_stacks(self) -> None:
        """Opens the file of stacks, again if its descriptor has become stale."""
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_DSYNC | (os.O_TRUNC if self._stacks is None else 0)
        former, self._stacks = self._stacks, os.open(stacks_file(self._folder, self._beat.rank), flags, 0o600)
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        if former is not None:
            with contextlib.suppress(OSError):
                os.close(former)

    def _run(self) -> None:
        pause = 0.0
        while not self._end.wait(pause):
            self._try(self._report)
            pause = self._every
        self._try(lambda: self._send(ended=True))

    def _try(self, act: Callable[[], object]) -> None:
        """Calls what sends messages. If the store does not answer, the next message connects again."""
        try:
            act()
        except (OSError, ProtocolError, Refused):
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _report(self) -> None:
        """Sends the progress, and answers the newest request, with the stacks first: the recorder of collectives might
        wait for a hung device."""
        if self._stacks is None:
            with contextlib.suppress(OSError):
                self._open_stacks()
        if (waits := storage.waits()) != self._waits:
            self._waits = waits
            self.touch("waiting for storage", self._progress[3])
        request = self._send()
        if not request or request == self._beat.collectives:
            return
        with contextlib.suppress(OSError):
            self._write_stacks(_all_stacks())
        self._send(stacks=request)
        with contextlib.suppress(OSError):
            text = json.dumps([asdict(group) for group in self._last_collectives()], indent=1) + "\n"
            write_in_place(collectives_file(self._folder, self._beat.rank), text.encode())
        self._send(collectives=request)

    def _send(self, **changes: Any) -> str:
        """Sends the record, or a message without one if it is unchanged; returns the newest request, empty without
        any."""
        progress, before = self._progress, self._sent
        touches, at, phase, step = progress
        idle = round(time.monotonic() - at, 3)
        beat = replace(self._beat, touches=touches, phase=phase[:100], step=step, idle=idle, **changes)
        self._sent = None  # until there is an answer: the next message repeats what may be lost
        request = self._ask_store(json.dumps(asdict(beat)).encode() if changes or progress != before else b"")
        self._beat, self._sent = beat, progress
        return request

    def _ask_store(self, record: bytes) -> str:
        assert self._store is not None
        if self._connection is None:
            self._connection = StoreConnection(self._store, timeout=_ANSWER_SECONDS)
            # A name server that does not answer later would stop the heartbeat.
            self._store = replace(self._store, host=self._connection.peer)
        fields = [number(self._beat.rank), record]
        status, answer = self._connection.call(Op.BEAT, fields, grace_seconds=_ANSWER_SECONDS)
        if status != Status.DONE or len(answer) != 1:
            raise ProtocolError("it does not take heartbeats")
        return answer[0].decode(errors="replace")

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


@dataclass(frozen=True)
class Collective:
    """One operation. ``sequence``: number in its group, equal on all ranks; ``sizes``: shapes of its inputs."""

    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    finished: bool


@dataclass(frozen=True)
class GroupState:
    """A process group on one back end as one of its ranks sees it. ``recent``: last collectives, oldest first.

    ``ranks`` are the job's. ``role``: of these ranks, empty in a job without roles; each role has groups of the same
    names, such as its default group, ``0``.
    """

    group: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    recent: tuple[Collective, ...]
    role: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the group, equal on all of its ranks and of no other group in the job."""
        return f"{self.role}/{self.group}" if self.role else self.group, self.backend

    @property
    def last(self) -> Collective:
        """The newest collective that the rank has called."""
        return self.recent[-1]

    @property
    def pending(self) -> Collective | None:
        """The oldest collective that has not finished on this rank."""
        return next((c for c in self.recent if not c.finished), None)

    def at(self, sequence: int) -> Collective | None:
        """The collective with that number, if it is among the recent ones."""
        return next((c for c in self.recent if c.sequence == sequence), None)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupState:
        recent = [
            Collective(c["sequence"], c["operation"], tuple(tuple(size) for size in c["sizes"]), c["finished"])
            for c in value["recent"]
        ]
        ranks = tuple(value["ranks"])
        return cls(value["group"], value["description"], value["backend"], ranks, tuple(recent), value["role"])


def write_in_place(path: Path, data: bytes) -> None:
    """Replaces the contents of a file without replacing the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, data)
        os.ftruncate(descriptor, len(data))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
