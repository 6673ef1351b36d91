"""TensorBoard's event files, written with its own messages.

torch's writer would load torch, and TensorBoard's own one ten times the modules of its messages.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlhpc.core.files import make_folder, names_in, read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.observe.trackers.points import MetricsPoint, Position
from rlhpc.observe.trackers.protocol import Outcome

_PREFIX = "events.out.tfevents."


class TensorBoard:
    """Event files of a run, in the folder ``tensorboard``.

    Steps that are taken again are hidden by the start of a new file, as TensorBoard has it: events of earlier files
    from that step on are skipped. The last step that is on disk is remembered, so that what a killed process wrote
    after it is hidden too.
    """

    def __init__(self, run: RunFolder) -> None:
        self._folder, self._state = run.tensorboard, run.trackers.state("tensorboard")
        make_folder(self._folder)
        self._known: dict[Position, MetricsPoint] = {}  # as on disk
        self._file: Path | None = None
        self._repeated: list[MetricsPoint] = []  # by the next file
        self._started = False

    def newest(self) -> Position | None:
        """The newest step of the event files."""
        return max(self._known, default=None)

    def rewrite(self, points: Sequence[MetricsPoint]) -> int:
        """Writes the steps that are new or differ from those that were written; returns their number."""
        if not self._started:
            self._started = True
            self._remember(points)
        same = 0
        for point in points:
            known = self._known.get(point.position)
            if known is None or (known.time, known.place) != (point.time, point.place):
                break
            same += 1
        kept = {point.position for point in points[:same]}
        gone = [point.place for position, point in self._known.items() if position not in kept]
        purged = min(gone, default=None)
        if purged is not None:
            self._known = {at: point for at, point in self._known.items() if point.place < purged}
            self._repeated = []
            self._begin(purged)
        new = [point for point in points if point.position not in self._known]
        self.log(new)
        return len(new)

    def log(self, points: Sequence[MetricsPoint]) -> None:
        """Appends steps."""
        if not points:
            return
        if self._file is None:
            points = [*self._repeated, *points]
            self._begin(points[0].place if names_in(self._folder, f"{_PREFIX}*") else None)
        assert self._file is not None
        _append(self._file, [_scalars(point) for point in points])
        self._known.update((point.position, point) for point in points)
        last = points[-1]
        write_json(self._state, {"phase": last.phase, "step": last.step, "time": last.time})

    def close(self, outcome: Outcome) -> None:
        """Nothing is open."""

    def _remember(self, points: Sequence[MetricsPoint]) -> None:
        """Finds the steps that earlier processes wrote. The next file repeats the last one, to hide what a killed
        process wrote after it; nothing is known if that step is gone."""
        try:
            state = read_json(self._state)
        except (FileNotFoundError, ValueError):
            return
        for number, point in enumerate(points, 1):
            if {"phase": point.phase, "step": point.step, "time": point.time} == state:
                self._known = {earlier.position: earlier for earlier in points[:number]}
                self._repeated = [earlier for earlier in points[:number] if earlier.place == point.place]

    def _begin(self, purged: int | None) -> None:
        """A new file, which hides the steps from ``purged`` on in the earlier ones. TensorBoard sorts files by name."""
        events = _messages()
        names = names_in(self._folder, f"{_PREFIX}*")
        last = max((int(part) for name in names if (part := name.split(".")[3]).isdecimal()), default=0)
        now = time.time()
        number = max(int(now), last + 1)
        self._file = self._folder / f"{_PREFIX}{number:010d}.{socket.gethostname()}.{os.getpid()}.0"
        written = [events.Event(wall_time=now, file_version="brain.Event:2")]
        if purged is not None:
            start = events.SessionLog(status=events.SessionLog.START)
            written.append(events.Event(wall_time=now, step=purged, session_log=start))
        _append(self._file, written)


def _scalars(point: MetricsPoint) -> Any:
    event = _messages().Event(wall_time=point.time, step=point.place)
    for name, value in point.metrics.items():
        event.summary.value.add(tag=name, simple_value=value)
    return event


def _append(path: Path, events: Sequence[Any]) -> None:
    """Appends records: length, its checksum, data, its checksum."""
    data = b""
    for event in events:
        body = event.SerializeToString()
        length = struct.pack("<Q", len(body))
        data += length + _checksum(length) + body + _checksum(body)
    with open(path, "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checksum(data: bytes) -> bytes:
    """Masked CRC-32C, as TFRecord files have it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return tuple(found)


@cache
def _messages() -> Any:
    from tensorboard.compat.proto import event_pb2

    return event_pb2
