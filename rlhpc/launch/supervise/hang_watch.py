"""Detects hangs by the heartbeats of all ranks, and reports the rank at fault and its place.

A rank that waits for a slow peer has not hung, so the newest progress of all ranks counts. Ages are measured by this
machine's clock from the moment a change is seen: the clocks of nodes differ.

Heartbeats come from the job's store, which is in this process: a rank that it does not hear has its last record.
Commands on the run read a file of all ranks, which is written here every two seconds for a few ranks and once a minute
for a thousand.
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
    message_seconds,
    parse_beat,
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
_PAUSE_SECONDS = 20.0  # between two polls; more is a pause of the whole process
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
class WatchedRanks:
    """Ranks of a job, and limits in seconds without progress of any: in general, and before the first progress (None:
    the same). ``placement``: their roles, if they have any."""

    count: int
    timeout_seconds: float
    start_seconds: float | None = None
    placement: Placement | None = None


class HangWatch:
    """Detects hangs. Call ``poll`` every half second or so; it returns the hang once there is one.

    Time counts from construction. ``folder``: of stacks, hang.txt and the file of all ranks. Ranks of this node that do
    not answer are sent DUMP_SIGNAL; ``signal_all`` is called to send it to the ranks of all nodes.
    """

    def __init__(
        self,
        folder: Path,
        ranks: WatchedRanks,
        received: ReceivedBeats,
        signal_all: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._received, self._clock = folder, received, clock
        self._ranks, self._placement = range(ranks.count), ranks.placement
        self._silence, self._start = ranks.timeout_seconds, ranks.start_seconds or ranks.timeout_seconds
        self._signal_all = signal_all
        self._signalled_at: float | None = None
        self._written: dict[int, int] = {}  # length of the stacks of ranks that were sent the signal
        self._look = message_seconds(ranks.count, ranks.timeout_seconds)
        self._records: dict[int, tuple[bytes, float]] = {}
        self._beats: dict[int, Beat] = {}
        self._progress_at, self._began = clock(), False
        self._asked_at: float | None = None
        self._polled_at = clock()
        self._request, self._requests = "", 0
        self._before: dict[int, int] = {}  # each rank's touches at the request
        shortest, longest = _SUMMARY_SECONDS
        self._summary_every = min(max(shortest, ranks.count / _RANKS_PER_SECOND), longest)
        self._summary_at = float("-inf")

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
        placement = roles_of(config, world_size)
        ranks = WatchedRanks(world_size, policy.hang_timeout_seconds, policy.start_seconds, placement)
        return cls(attempt.heartbeats, ranks, received, signal_all)

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
        """Reads the ranks' records; None while there is no hang, or its report is incomplete."""
        self._allow_for_pauses()
        self._read()
        if self._clock() - self._summary_at >= self._summary_every:
            self._write_summary()
        if self._asked_at is not None:
            return self._gather(self._asked_at)
        if self.silent_for > (self._silence if self._began else self._start):
            self._ask()
        return None

    def close(self) -> None:
        """Reads all records for the last time and writes the file of all ranks."""
        self._read()
        self._write_summary()

    def _ask(self) -> None:
        """Passes a request to the ranks, in the store's answers."""
        self._requests, self._signalled_at, self._asked_at = self._requests + 1, None, self._clock()
        self._request = f"request-{self._requests}"
        self._before = {rank: beat.touches for rank, beat in self._beats.items()}
        self._received.request = self._request.encode()

    def _allow_for_pauses(self) -> None:
        """Excludes time in which this process was suspended."""
        now, before = self._clock(), self._polled_at
        self._polled_at = now
        if now - before > _PAUSE_SECONDS:
            self._progress_at += now - before

    def _read(self) -> None:
        """Takes the records that have arrived since the last time."""
        for rank in self._ranks:
            record = self._received.record(rank)
            if record is None or record is self._records.get(rank):
                continue
            beat, before = parse_beat(record[0]), self._beats.get(rank)
            if beat is None:
                continue
            self._records[rank], self._beats[rank] = record, beat
            if beat.touches > (before.touches if before and before.process == beat.process else 0):
                self._began = True
                self._progress_at = max(self._progress_at, self._clock() - beat.idle)

    def _write_summary(self) -> None:
        """Writes the file of all ranks, their idle times as of now; an error delays it to the next time."""
        if not self._beats:
            return
        self._summary_at, now = self._clock(), time.monotonic()
        ages = {rank: beat.idle + now - self._records[rank][1] for rank, beat in self._beats.items()}
        with contextlib.suppress(OSError):
            write_beats(self._folder, [replace(self._beats[rank], idle=round(ages[rank], 3)) for rank in sorted(ages)])

    def _gather(self, asked_at: float) -> Hang | None:
        waiting = [rank for rank in self._ranks if not self._has_answered(rank)]
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
        states = [self._state(rank) for rank in self._ranks]
        finding = find_blocking_role(states)
        silence = self._silence if self._began else self._start
        report = report_text(finding, states, silence, self._stacks(finding.rank), self._folder)
        self._write_summary()
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
