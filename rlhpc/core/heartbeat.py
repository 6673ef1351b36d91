"""Heartbeat of a rank, and its stacks and collectives on request.

Ranks ``touch`` a phase whenever they make progress. A thread records that periodically, and sends the record to the
job's store, whose answer has the launcher's newest request. While the store does not answer, both are files in the
folder that all ranks and the launcher share. The thread answers a request with the Python stacks of all threads and the
last collectives, as files. A rank that holds the interpreter's lock in native code cannot run the thread: the launcher
sends it DUMP_SIGNAL, and faulthandler writes its stacks without the lock. That can crash a process with running
threads, so it is the last resort. A stopped process does not answer.

A message to the store opens no file. A thousand ranks that write a record and look for a request every few seconds
would open a thousand files a second on the shared file system. Files are written in place and opened for each read:
over NFS a client sees a change at once, but a new or renamed file up to a minute later. The launcher writes one file
for all ranks, for commands on the run.

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


@dataclass(frozen=True)
class Beat:
    """A rank's record. ``touches``: number of progress reports; ``idle``: seconds since the last one at writing.

    ``stacks`` and ``collectives``: newest requests that the rank has answered, empty without any; ``number``: how many
    records the rank had made before.
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
    number: int = 0


def beat_file(folder: Path, rank: int) -> Path:
    """A rank's record, written while the store does not answer."""
    return folder / f"rank-{rank:05d}.json"


def beats_file(folder: Path) -> Path:
    """Records of all ranks as the launcher knew them, a line each."""
    return folder / "ranks.jsonl"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks.txt"


def collectives_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.collectives.json"


def dump_file(folder: Path) -> Path:
    """File with the name of the newest request; a new name makes every rank answer."""
    return folder / "dump"


def parse_beat(text: str | bytes) -> Beat | None:
    """A record; None for anything else, such as half of one."""
    try:
        fields = json.loads(text)
        return Beat(**{**fields, "process": ProcessId(**fields["process"])})
    except (ValueError, TypeError, KeyError):
        return None


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The rank's own file; None if there is none or it is being written. Raises OSError if it cannot be read."""
    try:
        return parse_beat(beat_file(folder, rank).read_bytes())
    except FileNotFoundError:
        return None


def write_beats(folder: Path, beats: Iterable[Beat]) -> None:
    """Writes the file of all ranks. Raises OSError."""
    lines = [json.dumps(asdict(beat)) + "\n" for beat in beats]
    write_in_place(beats_file(folder), "".join(lines).encode())


def read_beats(folder: Path) -> dict[int, Beat]:
    """Records in the file of all ranks, but lines that are being written. Raises OSError if it cannot be read."""
    found = (parse_beat(line) for line in beats_file(folder).read_bytes().splitlines())
    return {beat.rank: beat for beat in found if beat is not None}


def look_seconds(world_size: int) -> float:
    """Interval at which a rank looks at the file of requests: at most a thousand looks a second for all ranks."""
    return min(max(0.5, world_size / 1000), 10.0)


def write_seconds(world_size: int, hang_timeout_seconds: float) -> float:
    """Minimum interval between writes of a file: two hundred a second for all ranks, and often enough for the hang
    watch."""
    return min(max(1.0, world_size / 200), hang_timeout_seconds / 4)


def message_seconds(world_size: int, hang_timeout_seconds: float) -> float:
    """Interval between two messages of a rank to the store: at most 200 a second for up to 6,000 ranks, which take a
    few percent of a core there, and often enough for the hang watch."""
    return min(max(0.5, world_size / 200), 30.0, hang_timeout_seconds / 4)


class Heartbeat:
    """Heartbeat of one rank. Call ``start`` early, before slow imports; any thread may call ``touch`` at any rate.
    ``store``: the job's store, if it has one."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        world_size: int = 1,
        hang_timeout_seconds: float = 1800.0,
        store: StoreAddress | None = None,
    ) -> None:
        self._folder = folder
        every = Intervals(
            look_seconds(world_size),
            write_seconds(world_size, hang_timeout_seconds),
            message_seconds(world_size, hang_timeout_seconds),
        )
        self._channel = BeatChannel(rank, beat_file(folder, rank), dump_file(folder), every, store)
        main = threading.main_thread().ident or 0
        self._beat = Beat(rank, node_name(), ProcessId.own(), main)
        # Count, time, phase, step: replaced as a whole, so that threads need no lock.
        self._progress: tuple[int, float, str, int | None] = (0, time.monotonic(), "starting", None)
        self._recorded: tuple[int, float, str, int | None] = self._progress
        self._written = float("-inf")
        self._begun = False
        self._stacks: int | None = None
        self._waits = storage.waits()
        self._collectives: Callable[[], Sequence[GroupState]] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        """Writes the first record and starts the thread, which sends it where there is a store; ``touch`` of this
        module then belongs to this rank."""
        global _current
        with contextlib.suppress(OSError):
            self._begin()
            if not self._channel.has_store:
                self.write()
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
            self.write(ended=True)
        _current = None

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open_stacks()
        self._begun = True

    def _open_stacks(self) -> None:
        """Opens the file of stacks, again if its descriptor has become stale."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_DSYNC | (os.O_TRUNC if self._stacks is None else 0)
        former, self._stacks = self._stacks, os.open(stacks_file(self._folder, self._beat.rank), flags, 0o600)
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        if former is not None:
            with contextlib.suppress(OSError):
                os.close(former)

    def _run(self) -> None:
        pause = 0.0 if self._channel.has_store else self._channel.look_seconds
        while not self._end.wait(pause):
            self._note_waits()
            for act in (self._write_when_due, self._answer):
                with contextlib.suppress(OSError):
                    act()
            pause = self._channel.look_seconds

    def _note_waits(self) -> None:
        if (waits := storage.waits()) != self._waits:
            self._waits = waits
            self.touch("waiting for storage", self._progress[3])

    def _write_when_due(self) -> None:
        first = self._written == float("-inf")
        if not self._begun:
            with contextlib.suppress(OSError):  # the store may take the record meanwhile
                self._begin()
        is_due = time.monotonic() - self._written >= self._channel.write_seconds
        if (first or self._progress != self._recorded) and is_due:
            self.write()

    def write(self, **changes: Any) -> None:
        progress, now = self._progress, time.monotonic()
        touches, at, phase, step = progress
        known: dict[str, Any] = {"touches": touches, "phase": phase[:100], "step": step, "idle": round(now - at, 3)}
        beat = replace(self._beat, number=self._beat.number + 1, **known, **changes)
        text = json.dumps(asdict(beat)).encode()
        assert len(text) < RECORD_BYTES
        self._channel.deliver(text)
        self._beat, self._written, self._recorded = beat, now, progress  # not before: a write that failed is still due

    def _answer(self) -> None:
        """Answers a request, with the stacks first: the recorder of collectives might wait for a hung device."""
        request = self._channel.request()
        if not request or request == self._beat.collectives:
            return
        with contextlib.suppress(OSError):
            self._write_stacks(_all_stacks())
        self.write(stacks=request)
        with contextlib.suppress(OSError):
            text = json.dumps([group.as_json() for group in self._last_collectives()], indent=1) + "\n"
            write_in_place(collectives_file(self._folder, self._beat.rank), text.encode())
        self.write(collectives=request)

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GroupState:
        recent = [
            Collective(c["sequence"], c["operation"], tuple(tuple(size) for size in c["sizes"]), c["finished"])
            for c in value["recent"]
        ]
        ranks = tuple(value["ranks"])
        return cls(value["group"], value["description"], value["backend"], ranks, tuple(recent), value["role"])


RECORD_BYTES = 1024  # at most; a file has this length
_ANSWER_SECONDS = 5.0  # for the store to accept a connection or to answer; then files are used
_RETRY_SECONDS = (1.0, 30.0)  # first and longest time between attempts to connect


@dataclass(frozen=True)
class Intervals:
    """Seconds between two looks at the file of requests, at least between two writes of a record's file, and between
    two messages to the store."""

    look: float
    write: float
    message: float


class BeatChannel:
    """One rank's channel. ``record``, ``request``: files in place of the store.

    Safe for threads: while one waits for the store, the other uses the files.
    """

    def __init__(self, rank: int, record: Path, request: Path, every: Intervals, store: StoreAddress | None) -> None:
        self._rank, self._record_file, self._request_file, self._address = rank, record, request, store
        self._every = every
        self._connection: StoreConnection | None = None
        self._lock = threading.Lock()
        self._next, self._pause = float("-inf"), _RETRY_SECONDS[0]  # time of the next attempt to connect
        self._request: str | None = None  # that of an answer that has not been taken

    @property
    def has_store(self) -> bool:
        """True if the job has a store, answering or not."""
        return self._address is not None

    @property
    def look_seconds(self) -> float:
        """Interval between two looks for a request."""
        return self._every.look if self._connection is None else self._every.message

    @property
    def write_seconds(self) -> float:
        """Minimum interval between two records."""
        return self._every.write if self._connection is None else 0.0

    def deliver(self, record: bytes) -> None:
        """Delivers a record. Raises OSError if neither the store takes it nor its file."""
        if not self._ask_store(record):
            write_in_place(self._record_file, record.ljust(RECORD_BYTES - 1) + b"\n")

    def request(self) -> str:
        """Name of the newest request, empty without any. Raises OSError if it cannot be read."""
        if self._request is None and not self._ask_store(b""):
            try:
                return self._request_file.read_text(encoding="utf-8").strip()[:100]
            except (FileNotFoundError, UnicodeDecodeError):
                return ""
        found, self._request = self._request or "", None
        return found

    def _ask_store(self, record: bytes) -> bool:
        """Sends a record, empty without news, and keeps the answer; False if the store does not answer."""
        if self._address is None or not self._lock.acquire(timeout=_ANSWER_SECONDS):
            return False
        try:
            connection = self._connected(self._address)
            if connection is None:
                return False
            fields = [number(self._rank), record]
            status, answer = connection.call(Op.BEAT, fields, grace_seconds=_ANSWER_SECONDS)
            if status != Status.DONE or len(answer) != 1:
                raise ProtocolError("it does not take heartbeats")
            self._request, self._pause = answer[0].decode(errors="replace"), _RETRY_SECONDS[0]
        except (OSError, ProtocolError, Refused):
            self._lost()
            return False
        finally:
            self._lock.release()
        return True

    def _connected(self, address: StoreAddress) -> StoreConnection | None:
        """The connection, opened if it is time to try; None without one."""
        if self._connection is None and time.monotonic() >= self._next:
            self._connection = StoreConnection(address, timeout=_ANSWER_SECONDS)
            # A name server that does not answer later would stop the heartbeat.
            self._address = replace(address, host=self._connection.peer)
        return self._connection

    def _lost(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._next = None, time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _RETRY_SECONDS[1])


def write_in_place(path: Path, data: bytes) -> None:
    """Replaces the contents of a file without replacing the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, data)
        os.ftruncate(descriptor, len(data))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
