"""A rank's heartbeat goes through the job's store, and through files only while that does not answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.core import heartbeat
from rlhpc.core.heartbeat import Beat, Heartbeat, beat_file, dump_file, parse_beat, read_beat, stacks_file, touch
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.waiting import until


@pytest.fixture
def server() -> Iterator[StoreServer]:
    opened = StoreServer.open(host="127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture
def beat(tmp_path: Path, server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """The heartbeat of rank 3, which sends ten messages a second and tries to connect again at once."""
    monkeypatch.setattr(heartbeat, "_RETRY_SECONDS", (0.1, 0.1))
    started = Heartbeat(tmp_path, 3, hang_timeout_seconds=0.4, store=address(server)).start()
    yield started
    if heartbeat._current is not None:
        started.stop()


def address(server: StoreServer) -> StoreAddress:
    return StoreAddress("127.0.0.1", server.port, server.secret)


def received(server: StoreServer) -> Beat | None:
    return parse_beat(server.beats.record(3))


def phase(server: StoreServer) -> str:
    found = received(server)
    return found.phase if found else ""


def test_the_store_has_the_progress_and_no_file_is_written(
    beat: Heartbeat, server: StoreServer, tmp_path: Path
) -> None:
    until(lambda: phase(server) == "starting")
    touch("rollout", 7)
    until(lambda: phase(server) == "rollout")
    found = received(server)
    assert found is not None
    assert (found.rank, found.step, found.touches) == (3, 7, 1)
    beat.stop()
    found = received(server)
    assert found is not None
    assert found.ended
    assert os.listdir(tmp_path) == ["rank-00003.stacks.txt"]


def test_without_progress_the_store_hears_the_rank_and_keeps_its_record(beat: Heartbeat, server: StoreServer) -> None:
    until(lambda: phase(server) == "starting")
    before, began = server.beats.record(3), time.monotonic()
    time.sleep(0.3)
    until(lambda: server.beats.silent_for(3) < time.monotonic() - began - 0.3)
    assert server.beats.record(3) is before


def test_a_request_in_the_stores_answer_is_answered(beat: Heartbeat, server: StoreServer, tmp_path: Path) -> None:
    server.beats.request = b"first"
    until(lambda: (found := received(server)) and found.collectives == "first")
    assert "test_a_request_in_the_stores_answer_is_answered" in stacks_file(tmp_path, 3).read_text()
    assert not dump_file(tmp_path).exists()


@pytest.mark.heavy
def test_a_rank_uses_files_while_the_store_is_away_and_returns_to_it(
    beat: Heartbeat, server: StoreServer, tmp_path: Path
) -> None:
    until(lambda: phase(server) == "starting")
    server.close()
    touch("without the store")
    until(lambda: (found := read_beat(tmp_path, 3)) and found.phase == "without the store")
    dump_file(tmp_path).write_text("first\n")
    until(lambda: (found := read_beat(tmp_path, 3)) and found.collectives == "first")
    again = StoreServer.open(server.port, server.secret, host="127.0.0.1")
    try:
        until(lambda: again.beats.silent_for(3) < 60)
        last = beat_file(tmp_path, 3).read_bytes()
        touch("with the store")
        until(lambda: phase(again) == "with the store")
        assert beat_file(tmp_path, 3).read_bytes() == last
    finally:
        beat.stop()
        again.close()


@pytest.mark.heavy
def test_a_rank_uses_files_while_the_store_is_stopped(
    beat: Heartbeat, server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: phase(server) == "starting")
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", 0.2)
    stopped = threading.Event()
    server._loop.call_soon_threadsafe(stopped.wait, 600)
    touch("alone")
    until(lambda: (found := read_beat(tmp_path, 3)) and found.phase == "alone", seconds=15)
    stopped.set()
    touch("together")
    until(lambda: phase(server) == "together")


@pytest.mark.heavy
def test_a_store_that_accepts_and_never_answers_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = StoreAddress("127.0.0.1", silent.getsockname()[1], bytes(32))
        beat = Heartbeat(tmp_path, 3, hang_timeout_seconds=0.4, store=store).start()
        try:
            until(lambda: read_beat(tmp_path, 3))
            touch("train")
            until(lambda: (found := read_beat(tmp_path, 3)) and found.phase == "train")
        finally:
            beat.stop()
    found = read_beat(tmp_path, 3)
    assert found is not None
    assert found.ended
