"""Heartbeats of all ranks, in the launcher: from the job's store, or from files of ranks that it does not hear.

Commands on the run read neither: for them the launcher writes one file for all ranks, every two seconds for a few ranks
and once a minute for a thousand.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlhpc.core.heartbeat import Beat, message_seconds, parse_beat, read_beat, write_beats

_FILES_PER_SECOND = 16  # read at most, of ranks that the store does not hear
_SUMMARY_SECONDS = (2.0, 60.0)  # shortest and longest interval between two files of all ranks
_RANKS_PER_SECOND = 16  # ranks that lengthen it by a second


class ReceivedBeats:
    """Newest record of each rank that the store has received. Its thread writes, the launcher's reads."""

    def __init__(self) -> None:
        self.request = b""  # the launcher's newest, which every answer has
        self._records: dict[int, bytes] = {}
        self._heard: dict[int, float] = {}

    def receive(self, rank: int, record: bytes) -> bytes:
        """Takes a record, empty without news, and returns the newest request."""
        if record:
            self._records[rank] = record
        self._heard[rank] = time.monotonic()
        return self.request

    def record(self, rank: int) -> bytes:
        """The rank's newest record, empty without any."""
        return self._records.get(rank, b"")

    def silent_for(self, rank: int) -> float:
        """Seconds since the rank's last message."""
        return time.monotonic() - self._heard.get(rank, float("-inf"))


@dataclass
class _Known:
    """What is known of a rank. ``seen``: when its record was first seen; ``error``: of the last look at its file."""

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
        """The rank's newest record, None without any. Raises OSError as long as it can only be in a file, which cannot
        be read. Unless ``at_once``, files are read at a limited rate."""
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
        """Takes the record that the store has of the rank; whether it has heard the rank lately."""
        known, raw = self._ranks[rank], received.record(rank)
        if raw is not known.raw:
            known.raw = raw
            self._take(known, parse_beat(raw))
        return received.silent_for(rank) < 3 * self._message + 2

    def _look(self, known: _Known, rank: int, *, at_once: bool) -> None:
        """Looks at the rank's file, if it is time to."""
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
    """Writes the file of all ranks now and then."""

    def __init__(self, folder: Path, world_size: int, beats: Callable[[], list[Beat]]) -> None:
        shortest, longest = _SUMMARY_SECONDS
        self._every = min(max(shortest, world_size / _RANKS_PER_SECOND), longest)
        self._folder, self._beats = folder, beats
        self._written = float("-inf")

    def write_when_due(self) -> None:
        """Writes it if it is time to."""
        if time.monotonic() - self._written >= self._every:
            self.write()

    def write(self) -> None:
        """Writes it; after an error at the next time."""
        if beats := self._beats():
            self._written = time.monotonic()
            with contextlib.suppress(OSError):
                write_beats(self._folder, beats)
