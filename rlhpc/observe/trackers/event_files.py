"""TensorBoard's event files, written with its own messages.

torch's writer would load torch, and TensorBoard's own one ten times the modules of its messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlhpc.core.files import make_folder, names_in, read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import StepHistograms, read_histograms
from rlhpc.observe.trackers.delivery import Delivery
from rlhpc.observe.trackers.protocol import MetricsPoint, Outcome, Position, TrackedRun

_PREFIX = "events.out.tfevents."


class TensorBoard:
    """Event files of a run, in the folder ``tensorboard``.

    Steps that are taken again are hidden by the start of a new file, as TensorBoard has it: events of earlier files
    from that step on are skipped. The last step that is on disk is remembered, so that what a killed process wrote
    after it is hidden too.
    """

    def __init__(self, run: RunFolder) -> None:
        self._folder, self._state = run.tensorboard, run.trackers.state("tensorboard")
        self._histograms = Histograms(run.histograms)
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
        self._known.update((point.position, point) for point in points)
        _append(self._file, [_scalars(point) for point in points] + self._histograms.new(self._known))
        self._write_state(points[-1])

    def close(self, outcome: Outcome) -> None:
        """Appends the last step's histograms, which are written after its metrics."""
        if self._file is not None and (events := self._histograms.new(self._known)):
            _append(self._file, events)
            self._write_state(self._known[max(self._known)])

    def _write_state(self, last: MetricsPoint) -> None:
        state = {"phase": last.phase, "step": last.step, "time": last.time, "histogram": self._histograms.newest}
        write_json(self._state, state)

    def _remember(self, points: Sequence[MetricsPoint]) -> None:
        """Finds the steps that earlier processes wrote. The next file repeats the last one, to hide what a killed
        process wrote after it; nothing is known if that step is gone."""
        try:
            state = read_json(self._state)
        except (FileNotFoundError, ValueError):
            return
        for number, point in enumerate(points, 1):
            if all(getattr(point, name) == state.get(name) for name in ("phase", "step", "time")):
                self._histograms.newest = int(state.get("histogram", 0))
                self._known = {earlier.position: earlier for earlier in points[:number]}
                self._repeated = [earlier for earlier in points[:number] if earlier.place == point.place]

    def _begin(self, purged: int | None) -> None:
        """A new file, which hides the steps from ``purged`` on in the earlier ones. TensorBoard sorts files by name."""
        events = _messages()
        if purged is not None:
            self._histograms.forget(purged, self._known)
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


class Histograms:
    """The histograms of RL steps that are not in the event files yet. ``newest``: last step that is."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, (0, 0, 0)
        self._read: list[StepHistograms] = []
        self.newest = 0

    def new(self, known: Mapping[Position, MetricsPoint]) -> list[Any]:
        """Events of the known steps after the newest one."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen != self._seen:
                self._read, self._seen = read_histograms(self._path), seen
        found = [(known[1, one.step], one) for one in self._read if one.step > self.newest and (1, one.step) in known]
        self.newest = max((one.step for _, one in found), default=self.newest)
        return [_bins(point, one) for point, one in found]

    def forget(self, place: int, known: Mapping[Position, MetricsPoint]) -> None:
        """Takes back the steps from a place on, which are hidden."""
        before = (step for (phase, step), point in known.items() if phase == 1 and point.place < place)
        self.newest = min(self.newest, max(before, default=0))


def _bins(point: MetricsPoint, step: StepHistograms) -> Any:
    """Event of a step's histograms. Sums are those of values in the middle of their bins."""
    event = _messages().Event(wall_time=point.time, step=point.place)
    for name, histogram in step.histograms.items():
        middles = [((low + high) / 2, count) for low, high, count in histogram.bins]
        event.summary.value.add(tag=f"{point.phase}/{name}").histo.CopyFrom(
            _summaries().HistogramProto(
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=sum(value * count for value, count in middles),
                sum_squares=sum(value * value * count for value, count in middles),
                bucket_limit=histogram.edges[1:],
                bucket=histogram.counts,
            )
        )
    return event


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
def _summaries() -> Any:
    from tensorboard.compat.proto import summary_pb2

    return summary_pb2


@cache
def _messages() -> Any:
    from tensorboard.compat.proto import event_pb2

    return event_pb2


def board(folder: RunFolder) -> Delivery:
    """The delivery to TensorBoard. Nothing is attached: its files lie in the run folder beside all others."""
    run = TrackedRun("", "", folder, "tensorboard")
    return Delivery(run, lambda run: TensorBoard(run.folder), lambda: ({}, []))
