"""A rank's signs of life: cheap, sent to the job's store, and answered even when the interpreter's lock is held."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlhpc.core import heartbeat
from rlhpc.core.heartbeat import (
    DUMP_SIGNAL,
    Beat,
    Collective,
    GroupState,
    Heartbeat,
    collectives_file,
    enter,
    message_seconds,
    parse_beat,
    stacks_file,
    touch,
)
from rlhpc.core.process import ProcessId
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.waiting import PATIENCE, until


@pytest.fixture
def beat(tmp_path, server):
    """The heartbeat of rank 3, which sends ten messages a second."""
    with beating(tmp_path, server) as started:
        yield started


@contextlib.contextmanager
def beating(folder, server):
    address = StoreAddress("127.0.0.1", server.port, server.secret)
    started = Heartbeat(folder, 3, hang_timeout_seconds=0.4, store=address).start()
    yield started
    if heartbeat._current is not None:
        started.stop()


def received(server, rank=3):
    """The rank's record in the store; an empty one without any."""
    record = server.beats.record(rank)
    return parse_beat(record[0]) if record else Beat(-1, "", ProcessId.own(), 0)


def ask(server, request, rank=3):
    """Sends a request, and waits for the answer."""
    server.beats.request = request.encode()
    until(lambda: received(server, rank).collectives == request)


def test_the_first_record_tells_no_progress(beat, server):
    until(lambda: server.beats.record(3))
    found = received(server)
    assert (found.rank, found.process, found.touches, found.phase) == (3, ProcessId.own(), 0, "starting")
    assert found.main_thread == threading.main_thread().ident


def test_progress_is_sent_with_its_phase_and_age_and_opens_no_file(beat, server, tmp_path):
    time.sleep(0.2)
    before = time.monotonic()
    touch("rollout", 7)
    until(lambda: received(server).touches == 1)
    found = received(server)
    assert (found.phase, found.step) == ("rollout", 7)
    assert found.idle < time.monotonic() - before + 0.001, "since the touch, not since the start"
    beat.stop()
    assert os.listdir(tmp_path) == ["rank-00003.stacks.txt"]


def test_a_phase_of_the_start_is_sent_and_is_no_progress(beat, server):
    enter("importing")
    until(lambda: received(server).phase == "importing")
    found = received(server)
    assert (found.touches, found.step) == (0, None), "the time that a start may take still counts"


def test_without_progress_no_record_is_sent(beat, server):
    touch("rollout")
    until(lambda: received(server).touches == 1)
    before = server.beats.record(3)
    time.sleep(0.5)
    assert server.beats.record(3) is before


def test_a_touch_is_cheap(beat):
    began = time.thread_time()
    for step in range(100_000):
        touch("train", step)
    assert time.thread_time() - began < 0.3, "3 µs each; a call that touches a file takes ten"


def test_without_a_heartbeat_a_touch_does_nothing():
    assert heartbeat._current is None
    touch("train")


def test_intervals_follow_the_number_of_ranks_and_stay_within_the_silence():
    assert [message_seconds(size, 1800) for size in (8, 1024, 10**6)] == [0.5, 5.12, 30.0]
    assert message_seconds(10**6, 60) == 15.0


@pytest.mark.heavy
def test_a_rank_repeats_its_record_to_a_store_that_was_away(beat, server):
    until(lambda: received(server).phase == "starting")
    server.close()
    touch("without the store")
    time.sleep(0.5)
    assert received(server).phase == "starting", "the launcher knows what it received last"
    again = StoreServer.open(server.port, server.secret, host="127.0.0.1")
    try:
        until(lambda: received(again).phase == "without the store")
        ask(again, "first")
        beat.stop()
        assert received(again).ended
    finally:
        again.close()


@pytest.mark.heavy
def test_a_record_that_a_stopped_store_did_not_take_is_sent_again(beat, server, monkeypatch):
    until(lambda: received(server).phase == "starting")
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", 0.2)
    stopped = threading.Event()
    server._loop.call_soon_threadsafe(stopped.wait, 600)
    touch("alone", 1)
    until(lambda: beat._connection is None, seconds=15)
    stopped.set()
    until(lambda: (received(server).phase, received(server).step) == ("alone", 1))
    ask(server, "first")


@pytest.mark.heavy
def test_a_store_that_accepts_and_never_answers_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        address = StoreAddress("127.0.0.1", silent.getsockname()[1], bytes(32))
        beat = Heartbeat(tmp_path, 3, hang_timeout_seconds=0.4, store=address).start()
        connections = [silent.accept()[0] for _ in range(2)]
        beat.stop()
        for connection in connections:
            connection.close()


@pytest.mark.heavy
def test_a_request_is_answered_with_the_stacks_of_all_threads_and_the_collectives(beat, server, tmp_path):
    end = threading.Event()
    known = GroupState("0", "default_pg", "gloo", (0, 1), (Collective(5, "all_reduce", ((3, 2),), False),))
    beat.watch_collectives(lambda: [known])
    threading.Thread(target=lambda: end.wait(600), name="other", daemon=True).start()
    touch("train", 2)
    ask(server, "first")
    end.set()
    assert received(server).stacks == "first"
    assert received(server).phase == "train", "the record is of now"
    text = stacks_file(tmp_path, 3).read_text()
    assert f"0x{threading.main_thread().ident:016x}" in text
    assert "in test_a_request_is_answered_with_the_stacks_of_all_threads_and_the_collectives" in text
    assert "in <lambda>" in text
    assert [GroupState.from_json(value) for value in json.loads(collectives_file(tmp_path, 3).read_text())] == [known]


@pytest.mark.heavy
def test_stacks_are_at_no_time_gone(beat, server, monkeypatch):
    """The thread may have to stop for good at each of its calls, when native code takes the interpreter's lock."""
    ask(server, "first")
    sizes = []

    def watched(call):
        def watch(descriptor, *arguments):
            done = call(descriptor, *arguments)
            if descriptor == beat._stacks:
                sizes.append(os.fstat(descriptor).st_size)
            return done

        return watch

    for name in ("write", "pwrite", "ftruncate", "lseek"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    ask(server, "second")
    assert len(sizes) >= 2
    assert all(sizes)


@pytest.mark.heavy
def test_each_request_is_answered_once(beat, server, tmp_path):
    ask(server, "first")
    stacks_file(tmp_path, 3).write_text("")
    time.sleep(0.5)
    assert stacks_file(tmp_path, 3).read_text() == ""
    ask(server, "second")
    assert stacks_file(tmp_path, 3).read_text() != ""


@pytest.mark.heavy
def test_collectives_that_cannot_be_determined_do_not_end_the_thread(beat, server):
    beat.watch_collectives(lambda: 1 / 0)
    ask(server, "first")
    touch("later")
    until(lambda: received(server).phase == "later")


@pytest.mark.heavy
def test_a_rank_starts_answers_and_ends_though_its_folder_fails(server, tmp_path):
    folder = tmp_path / "heartbeats"
    folder.symlink_to("/proc/self/mem")  # ENOTDIR at first
    with beating(folder, server) as beat:
        ask(server, "first")
        folder.unlink()
        until(stacks_file(folder, 3).exists)
        ask(server, "second")
        assert "test_heartbeat.py" in stacks_file(folder, 3).read_text()
        folder.rename(tmp_path / "gone")
        ask(server, "third")
        beat.stop()
        assert received(server).ended


def test_the_end_is_sent(beat, server):
    touch("done")
    beat.stop()
    found = received(server)
    assert (found.ended, found.phase, found.touches) == (True, "done", 1)


def test_a_record_that_is_half_written_is_none():
    assert parse_beat('{"rank": 0, "no') is None


# The interpreter's lock is not released from before "in" is written until a line is read.
STUCK = """
import ctypes, sys, time
from pathlib import Path
from rlhpc.core.heartbeat import Heartbeat, touch
from rlhpc.core.store_client import store_address
Heartbeat(Path(sys.argv[1]), 0, hang_timeout_seconds=0.4, store=store_address()).start()
library = ctypes.PyDLL(None)
buffer = ctypes.create_string_buffer(1)

def in_native_code():
    library.write(1, b"in\\n", 3)
    library.read(0, buffer, 1)

touch("train")
sys.setswitchinterval(1000)
in_native_code()
print("out", flush=True)
time.sleep(600)
"""


@pytest.mark.heavy
def test_while_native_code_holds_the_lock_the_signal_writes_the_stack(server, tmp_path):
    environ = {**os.environ, **server.environment("127.0.0.1")}
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environ)
    try:
        assert process.stdout.readline() == "in\n"
        server.beats.request = b"first"
        time.sleep(1)
        assert received(server, 0).stacks == ""
        process.send_signal(DUMP_SIGNAL)
        until(lambda: "in in_native_code" in stacks_file(tmp_path, 0).read_text())
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "out\n"
        ask(server, "first", rank=0)
        assert "in _all_stacks" in stacks_file(tmp_path, 0).read_text(), "replaced by the rank's own answer"
    finally:
        process.kill()
        process.wait()


def test_the_signal_does_not_end_a_process_that_does_not_know_it():
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1, text=True)
    assert child.stdout.readline() == "up\n"
    child.send_signal(DUMP_SIGNAL)
    child.communicate("\n", timeout=100)
    assert child.returncode == 0
