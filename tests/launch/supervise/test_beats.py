"""The launcher has every rank's heartbeat from the store or from the rank's file, and writes one file for all."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlhpc.core.heartbeat import Beat, beat_file, beats_file, dump_file, read_beats, write_beats
from rlhpc.core.process import ProcessId
from rlhpc.launch.supervise import hang_watch, job_store
from rlhpc.launch.supervise.hang_watch import BeatReader, BeatSummary, HangWatch, ReceivedBeats
from tests.launch.supervise.test_hang_watch import LIMITS, Clock


class Time:
    """The clock of this machine, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(hang_watch, "time", self)
        monkeypatch.setattr(job_store, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def beat(rank: int, number: int, touches: int = 0, **fields: object) -> Beat:
    return replace(Beat(rank, "node1", ProcessId(1, 2), 3, touches, "train", number=number), **fields)  # type: ignore[arg-type]


def record(known: Beat) -> bytes:
    return json.dumps(asdict(known)).encode()


def reader(folder: Path, ranks: int, received: ReceivedBeats) -> BeatReader:
    found = BeatReader(folder, ranks, 1800.0)
    found.listen(received)
    return found


def test_a_rank_that_the_store_hears_costs_no_file(tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "read_beat", lambda *_: pytest.fail("a file was opened"))
    received = ReceivedBeats()
    received.receive(0, record(beat(0, 1)))
    assert reader(tmp_path, 1, received).read(0) == beat(0, 1)


def test_a_rank_that_the_store_no_longer_hears_is_read_from_its_file(tmp_path: Path, time: Time) -> None:
    received = ReceivedBeats()
    received.receive(0, record(beat(0, 4)))
    found = reader(tmp_path, 1, received)
    beat_file(tmp_path, 0).write_bytes(record(beat(0, 5)))
    assert found.read(0) == beat(0, 4)
    time.now += 10
    assert found.read(0) == beat(0, 5)
    received.receive(0, record(beat(0, 6)))
    assert found.read(0) == beat(0, 6), "it has come back to the store"
    time.now += 10
    assert found.read(0) == beat(0, 6), "the file is older"


def test_a_rank_that_was_started_again_counts_from_the_beginning(tmp_path: Path, time: Time) -> None:
    received = ReceivedBeats()
    received.receive(0, record(beat(0, 4)))
    found = reader(tmp_path, 1, received)
    assert found.read(0) == beat(0, 4)
    again = beat(0, 1, process=ProcessId(7, 9))
    received.receive(0, record(again))
    assert found.read(0) == again
    beat_file(tmp_path, 0).write_bytes(record(beat(0, 5)))
    time.now += 10
    assert found.read(0) == again, "the file is of the process before"


def test_files_of_many_silent_ranks_are_read_at_a_limited_rate(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    monkeypatch.setattr(hang_watch, "read_beat", lambda _, rank: read.append(rank))
    found = reader(tmp_path, 256, ReceivedBeats())
    for second in range(120):
        if second == 20:
            read.clear()
        time.now += 1
        for rank in range(256):
            found.read(rank)
    assert 256 * 5 <= len(read) <= 256 * 7, "every 16 s"
    assert found.read(5, at_once=True) is None
    assert read[-1] == 5


def test_a_file_that_cannot_be_read_is_an_error_until_the_store_hears_the_rank(tmp_path: Path, time: Time) -> None:
    received = ReceivedBeats()
    found = reader(tmp_path, 1, received)
    beat_file(tmp_path, 0).symlink_to("/proc/self/mem")
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            found.read(0)
    received.receive(0, record(beat(0, 1)))
    assert found.read(0) == beat(0, 1)


def test_a_hang_is_asked_for_and_answered_through_the_store(tmp_path: Path) -> None:
    clock, received = Clock(), ReceivedBeats()
    watch = HangWatch(tmp_path, 2, LIMITS, clock=clock)
    watch.listen(received)
    for rank in (0, 1):
        received.receive(rank, record(beat(rank, 1, touches=5)))
    clock.pass_by(watch, 99)
    assert received.request == b""
    clock.pass_by(watch, 3)
    assert received.request == b"request-1"
    assert dump_file(tmp_path).read_text() == "request-1\n", "for ranks without the store"
    answered = {"stacks": "request-1", "collectives": "request-1"}
    for rank in (0, 1):
        assert received.receive(rank, record(beat(rank, 2, touches=5, **answered))) == b"request-1"
    hang = clock.pass_by(watch, 1)
    assert hang is not None
    assert {one.collectives for one in read_beats(tmp_path).values()} == {"request-1"}


def test_progress_in_the_store_is_no_hang(tmp_path: Path) -> None:
    clock, received = Clock(), ReceivedBeats()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    watch.listen(received)
    for number in range(1, 10):
        received.receive(0, record(beat(0, number, touches=number)))
        assert clock.pass_by(watch, 90) is None
    assert received.request == b""


def test_the_file_of_all_ranks_is_written_once_a_minute_for_a_thousand(tmp_path: Path, time: Time) -> None:
    written: list[float] = []

    def known() -> list[Beat]:
        written.append(time.now)
        return [beat(0, 1)]

    many, few = BeatSummary(tmp_path, 1024, known), BeatSummary(tmp_path, 8, lambda: [beat(0, 2)])
    for _ in range(600):
        time.now += 1
        many.write_when_due()
    assert len(written) == 10
    few.write_when_due()
    assert read_beats(tmp_path) == {0: beat(0, 2)}


def test_the_file_of_all_ranks_has_their_ages_as_of_now(tmp_path: Path, time: Time) -> None:
    received = ReceivedBeats()
    received.receive(0, record(beat(0, 1, idle=2.0)))
    found = reader(tmp_path, 2, received)
    found.read(0)
    time.now += 40
    assert [(one.rank, one.idle) for one in found.summary()] == [(0, 42.0)]


def test_lines_that_are_being_written_are_left_out(tmp_path: Path) -> None:
    write_beats(tmp_path, [beat(0, 1), beat(1, 1)])
    text = beats_file(tmp_path).read_text()
    beats_file(tmp_path).write_text(text[:-30])
    assert read_beats(tmp_path) == {0: beat(0, 1)}
