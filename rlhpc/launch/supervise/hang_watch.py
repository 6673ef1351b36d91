"""Detects hangs by the heartbeats of all ranks, and reports the rank at fault and its place.

A rank that waits for a slow peer has not hung, so the newest progress of all ranks counts. Ages are measured by this
machine's clock from the moment a change is seen: the clocks of nodes differ.

Heartbeats come from the job's store, or from files of ranks that it does not hear. Commands on the run read neither:
for them the launcher writes one file for all ranks, every two seconds for a few ranks and once a minute for a thousand.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.config.schema import RunConfig
from rlhpc.core import storage
from rlhpc.core.files import write_atomic
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import (
    DUMP_SIGNAL,
    Beat,
    GroupState,
    collectives_file,
    dump_file,
    look_seconds,
    message_seconds,
    parse_beat,
    read_beat,
    stacks_file,
    write_beats,
)
from rlhpc.core.rank import node_name
from rlhpc.launch.roles import roles_of
from rlhpc.launch.supervise.hang_analysis import Condition, Finding, RankState, find_blocking_role, parse_stacks
from rlhpc.launch.supervise.job_store import ReceivedBeats
from rlhpc.sharding.placement import Placement

_SIGNAL_SECONDS = 2.0  # after the last rank has looked for the request
_ANSWER_SECONDS = 3.0  # after the signal
_WRITING_SECONDS = 6.0  # after the signal, for stacks that still grow: each piece is written to disk by itself
_READING_SECONDS = 0.1  # of one poll: the caller has other things to watch
_PASS_SECONDS = 1.0
_PAUSE_SECONDS = 20.0  # between two polls; more is a pause of the whole process
_FILES_PER_SECOND = 16  # read at most, of ranks that the store does not hear
_SUMMARY_SECONDS = (2.0, 60.0)  # shortest and longest interval between two files of all ranks
_RANKS_PER_SECOND = 16  # ranks that lengthen it by a second


@dataclass(frozen=True)
class Hang:
    """A hang and the rank at fault. ``rank`` -1: none in particular. ``message``: one line; ``report``: text of
    hang.txt."""

    rank: int
    node: str
    message: str
    report: str


@dataclass(frozen=True)
class HangLimits:
    """Limits in seconds: without progress of any rank, in general and before the first progress (None: the same), and
    with records that cannot be read, which do not count until then."""

    timeout_seconds: float
    start_seconds: float | None = None
    storage_seconds: float = 300.0


class HangWatch:
    """Detects hangs. Call ``poll`` every half second or so; it returns the hang once there is one.

    Time counts from construction. Ranks of this node that do not answer are sent DUMP_SIGNAL; ``signal_all`` is called
    to send it to the ranks of all nodes. ``placement``: the roles of the ranks, if they have any.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        limits: HangLimits,
        signal_all: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement
        self._reader = BeatReader(folder, world_size, limits.timeout_seconds)
        self._summary = BeatSummary(folder, world_size, self._reader.summary)
        self._folder, self._world_size, self._clock = folder, world_size, clock
        self._silence, self._start = limits.timeout_seconds, limits.start_seconds or limits.timeout_seconds
        self._signal_all = signal_all
        self._signalled_at: float | None = None
        self._written: dict[int, int] = {}  # length of the stacks of ranks that were sent the signal
        self._look = look_seconds(world_size)
        self._beats: dict[int, Beat] = {}
        self._storage, self._blind = limits.storage_seconds, 0.0  # seconds for which some record could not be read
        self._unreadable: set[int] = set()  # ranks whose record could not be read when it was last tried
        self._next, self._next_pass = 0, clock()  # the rank whose record is read next; when to begin with the first
        self._progress_at, self._began = clock(), False
        self._asked_at: float | None = None
        self._refused_at: float | None = None  # when writing a request first failed
        self._polled_at = clock()
        self._request, self._requests = "", 0
        self._before: dict[int, int] = {}  # each rank's touches at the request
        storage.patiently(lambda: folder.mkdir(parents=True, exist_ok=True), folder)
        # Ranks see a file that changes sooner than a new one (core/heartbeat.py).
        storage.patiently(lambda: dump_file(folder).write_text(""), folder)

    @classmethod
    def of_attempt(
        cls,
        attempt: AttemptFolder,
        config: RunConfig,
        world_size: int,
        received: ReceivedBeats,
        signal_all: Callable[[], object] | None = None,
    ) -> HangWatch:
        """Watch of an attempt by its configuration, with heartbeats that the job's store has received."""
        policy = config.recovery
        limits = HangLimits(policy.hang_timeout_seconds, policy.start_seconds, policy.storage_wait_seconds)
        placement = roles_of(config, world_size)
        found = cls(attempt.heartbeats, world_size, limits, signal_all, placement=placement)
        found.listen(received)
        return found

    def listen(self, received: ReceivedBeats) -> None:
        """Takes heartbeats from the job's store too, not from files alone. ``received``: those that its server has."""
        self._look = max(self._look, self._reader.listen(received))

    def begin_again(self) -> None:
        """Counts time as from construction: ranks are started again while others wait for them."""
        self._progress_at, self._began, self._asked_at = self._clock(), False, None

    @property
    def silent_for(self) -> float:
        """Seconds since the newest known progress."""
        return self._clock() - self._progress_at

    @property
    def phase(self) -> str:
        """Phase of the first rank, as last read; empty before it has started."""
        return self._beats[0].phase if 0 in self._beats else ""

    def poll(self) -> Hang | None:
        """Reads some of the ranks' records; None while there is no hang, or its report is incomplete."""
        self._allow_for_pauses()
        self._summary.write_when_due()
        if self._asked_at is not None:
            return self._gather(self._asked_at)
        self._read_some()
        if self.silent_for > (self._silence if self._began else self._start) and not self._is_blind:
            self._ask()
        return None

    def close(self) -> None:
        """Reads all records for the last time and writes the file of all ranks."""
        for rank in range(self._world_size):
            self._read(rank)
        self._summary.write()

    @property
    def _is_blind(self) -> bool:
        """True if some record cannot be read, for less than the limit."""
        return bool(self._unreadable) and self._blind < self._storage

    def _ask(self) -> None:
        """Passes a request to the ranks: through the store, and by the file that others read."""
        self._requests, self._signalled_at = self._requests + 1, None
        self._request = f"request-{self._requests}"
        self._before = {rank: beat.touches for rank, beat in self._beats.items()}
        try:
            dump_file(self._folder).write_text(self._request + "\n")
        except OSError:
            self._refused_at = self._clock() if self._refused_at is None else self._refused_at
            if self._clock() - self._refused_at < self._storage:
                return  # the next poll retries; at last the signal is sent
        self._refused_at, self._asked_at = None, self._clock()
        self._reader.ask(self._request)

    def _allow_for_pauses(self) -> None:
        """Excludes time in which this process was suspended or could not read."""
        now, before = self._clock(), self._polled_at
        self._polled_at = now
        if self._is_blind or now - before > _PAUSE_SECONDS:
            self._progress_at += now - before
        self._blind = self._blind + now - before if self._unreadable else 0.0

    def _read_some(self) -> None:
        """Reads further records: all once a second, unless there are too many."""
        if self._next == 0:
            if self._clock() < self._next_pass:
                return
            self._next_pass = self._clock() + _PASS_SECONDS
        until = time.monotonic() + _READING_SECONDS
        while time.monotonic() < until:
            self._look_at(self._next)
            self._next = (self._next + 1) % self._world_size
            if self._next == 0:
                return

    def _look_at(self, rank: int) -> None:
        beat, before = self._read(rank), self._beats.get(rank)
        if beat is None:
            return
        self._beats[rank] = beat
        if beat.touches > (before.touches if before and before.process == beat.process else 0):
            self._began = True
            self._progress_at = max(self._progress_at, self._clock() - beat.idle)

    def _read(self, rank: int, *, at_once: bool = False) -> Beat | None:
        """The rank's record, None also where it cannot be read."""
        try:
            beat = self._reader.read(rank, at_once=at_once)
        except OSError:
            self._unreadable.add(rank)
            return None
        self._unreadable.discard(rank)
        return beat

    def _gather(self, asked_at: float) -> Hang | None:
        waiting = [rank for rank in range(self._world_size) if not self._has_answered(rank)]
        if self._is_blind:
            self._asked_at = None  # answers cannot be read: ask again later
            return None
        if any(beat.touches > self._before.get(rank, 0) for rank, beat in self._beats.items()):
            self._began, self._progress_at, self._asked_at = True, self._clock(), None  # slow, and moving again
            return None
        if waiting and self._clock() - asked_at <= self._look + _SIGNAL_SECONDS:
            return None
        if waiting and self._signalled_at is None:
            self._signalled_at = self._clock()  # counted from now: this process may not have polled for a while
            self._send_signal(waiting)
        if waiting and self._may_answer(waiting):
            return None
        states = [self._state(rank) for rank in range(self._world_size)]
        finding = find_blocking_role(states)
        silence = self._silence if self._began else self._start
        report = report_text(finding, states, silence, self._stacks(finding.rank), self._folder)
        self._summary.write()
        with contextlib.suppress(OSError):  # the finding matters more than the file
            write_atomic(self._folder / "hang.txt", report, storage.NONE)
        return Hang(finding.rank, finding.node, finding.message, report)

    def _send_signal(self, ranks: Sequence[int]) -> None:
        """Sends DUMP_SIGNAL to ranks, which may hold the interpreter's lock in native code."""
        beats = [self._beats[rank] for rank in ranks if rank in self._beats]
        for beat in beats:
            if beat.node == node_name() and beat.process.is_alive():
                with contextlib.suppress(OSError):
                    os.kill(beat.process.pid, DUMP_SIGNAL)
        if self._signal_all is not None and any(beat.node != node_name() for beat in beats):
            self._signal_all()

    def _may_answer(self, ranks: Sequence[int]) -> bool:
        """True shortly after the signal, or while faulthandler writes."""
        assert self._signalled_at is not None
        written = {rank: len(self._stacks(rank)) for rank in ranks}
        growing, self._written = written != self._written, written
        limit = _WRITING_SECONDS if growing else _ANSWER_SECONDS
        return self._clock() - self._signalled_at < limit

    def _has_answered(self, rank: int) -> bool:
        beat = self._beats.get(rank)
        if beat is None or beat.collectives != self._request:
            beat = self._read(rank, at_once=True) or beat
            if beat is not None:
                self._beats[rank] = beat
        return beat is not None and (beat.ended or beat.collectives == self._request)

    def _state(self, rank: int) -> RankState:
        beat = self._beats.get(rank)
        role = self._placement.label(rank) if self._placement is not None else ""
        if beat is None:
            return RankState(rank, condition="absent", role=role)
        frames = parse_stacks(self._stacks(rank), beat.main_thread)
        condition: Condition = "silent"
        if beat.ended:
            condition = "ended"
        elif beat.stacks == self._request:
            condition = "answered"
        elif frames:
            condition = "stuck"
        idle = beat.idle if condition == "answered" else None
        groups = self._groups(rank) if beat.collectives == self._request else ()
        return RankState(rank, beat.node, condition, beat.phase, beat.step, idle, frames, groups, role)

    def _stacks(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return stacks_file(self._folder, rank).read_text(encoding="utf-8", errors="replace")
        return ""

    def _groups(self, rank: int) -> tuple[GroupState, ...]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = collectives_file(self._folder, rank).read_text(encoding="utf-8")
            return tuple(GroupState.from_json(value) for value in json.loads(text))
        return ()


def report_text(finding: Finding, states: Sequence[RankState], silence: float, stacks: str, folder: Path) -> str:
    """The finding, a row for each rank, and all Python stacks of the rank that caused the hang."""
    header = ("rank", "role", "node", "", "phase", "step", "idle", "last collective", "innermost own frame")
    rows = [header, *(_row(state) for state in states)]
    if not any(state.role for state in states):
        rows = [row[:1] + row[2:] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [finding.message, "", f"No rank made progress for {silence:g} s.", "", *table, ""]
    threads = [thread for thread in stacks.split("\n\n") if thread.strip() and "/core/heartbeat.py" not in thread]
    if threads:
        lines += [f"Python stacks of rank {finding.rank}, innermost call first:", "", "\n\n".join(threads).rstrip(), ""]
    lines += [f"Stacks of every rank: {stacks_file(folder, 0).with_name('rank-*.stacks.txt')}"]
    return "\n".join(lines) + "\n"


def _row(state: RankState) -> tuple[str, ...]:
    calls = [(group, group.pending or group.last) for group in state.groups]
    calls.sort(key=lambda pair: pair[1].finished)
    last = ""
    for group, call in calls[:1]:
        waiting = "" if call.finished else ", waiting"
        last = f"{call.operation} #{call.sequence} of {group.description or group.group}{waiting}"
    return (
        str(state.rank),
        state.role,
        state.node or "?",
        "" if state.condition == "answered" else state.condition,
        state.phase,
        "" if state.step is None else str(state.step),
        "" if state.idle is None else f"{state.idle:.0f} s",
        last,
        str(state.own_frame or ""),
    )


@dataclass
class _Known:
    """Knowledge of a rank. ``seen``: time at which its record was first seen; ``error``: of the last look at its
    file."""

    raw: bytes = b""
    beat: Beat | None = None
    seen: float = 0.0
    next_look: float = float("-inf")
    error: OSError | None = None


class BeatReader:
    """Reads the newest record of each rank: from files alone, until ``listen`` is called."""

    def __init__(self, folder: Path, world_size: int, hang_timeout_seconds: float) -> None:
        self._folder = folder
        self._received: ReceivedBeats | None = None
        self._message = message_seconds(world_size, hang_timeout_seconds)
        self._longest = hang_timeout_seconds / 4
        self._ranks = [_Known() for _ in range(world_size)]
        self._unheard: set[int] = set()

    def listen(self, received: ReceivedBeats) -> float:
        """Takes the store's records first; returns the interval at which ranks ask it for requests, in seconds."""
        self._received = received
        return self._message

    def ask(self, request: str) -> None:
        """Passes a request to the ranks that the store hears."""
        if self._received is not None:
            self._received.request = request.encode()

    def read(self, rank: int, *, at_once: bool = False) -> Beat | None:
        """The rank's newest record, None without any. Raises OSError as long as it can only be in a file that cannot be
        read. Unless ``at_once``, files are read at a limited rate."""
        known = self._ranks[rank]
        if self._received is None:
            self._take(known, read_beat(self._folder, rank))
        elif self._hears(rank, self._received):
            self._unheard.discard(rank)
            known.error = None
        else:
            self._unheard.add(rank)
            self._look(known, rank, at_once=at_once)
        if known.error is not None:
            raise known.error
        return known.beat

    def summary(self) -> list[Beat]:
        """Newest records of all ranks, their idle times as of now."""
        now = time.monotonic()
        known = [(one.beat, now - one.seen) for one in self._ranks if one.beat is not None]
        return [replace(beat, idle=round(beat.idle + age, 3)) for beat, age in known]

    def _hears(self, rank: int, received: ReceivedBeats) -> bool:
        """Takes the record that the store has of the rank; true if it has heard the rank lately."""
        known, raw = self._ranks[rank], received.record(rank)
        if raw is not known.raw:
            known.raw = raw
            self._take(known, parse_beat(raw))
        return received.silent_for(rank) < 3 * self._message + 2

    def _look(self, known: _Known, rank: int, *, at_once: bool) -> None:
        """Looks at the rank's file if it is due."""
        now = time.monotonic()
        if not at_once and now < known.next_look:
            return
        known.next_look = now + min(max(1.0, len(self._unheard) / _FILES_PER_SECOND), self._longest)
        try:
            self._take(known, read_beat(self._folder, rank))
            known.error = None
        except OSError as error:
            known.error = error

    def _take(self, known: _Known, beat: Beat | None) -> None:
        """Takes a record, unless a newer one is known from another channel, or one of a process that was started
        later."""
        before = known.beat if self._received is not None else None
        if beat is None or (before and _order(beat) <= _order(before)):
            return
        if beat != known.beat:
            known.beat, known.seen = beat, time.monotonic()


def _order(beat: Beat) -> tuple[int, int]:
    """Order of the records of a rank, which is started again on the same node."""
    return beat.process.start, beat.number


class BeatSummary:
    """Writes the file of all ranks at intervals."""

    def __init__(self, folder: Path, world_size: int, beats: Callable[[], list[Beat]]) -> None:
        shortest, longest = _SUMMARY_SECONDS
        self._every = min(max(shortest, world_size / _RANKS_PER_SECOND), longest)
        self._folder, self._beats = folder, beats
        self._written = float("-inf")

    def write_when_due(self) -> None:
        """Writes the file if it is due."""
        if time.monotonic() - self._written >= self._every:
            self.write()

    def write(self) -> None:
        """Writes the file; an error delays it to the next time."""
        if beats := self._beats():
            self._written = time.monotonic()
            with contextlib.suppress(OSError):
                write_beats(self._folder, beats)
