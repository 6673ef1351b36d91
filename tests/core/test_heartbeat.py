"""A rank's signs of life: cheap, seldom written, and answered even when the interpreter's lock is held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from rlhpc.core import heartbeat
from rlhpc.core.heartbeat import (
    DUMP_SIGNAL,
    Collective,
    GroupState,
    Heartbeat,
    collectives_file,
    dump_file,
    enter,
    look_seconds,
    message_seconds,
    read_beat,
    stacks_file,
    touch,
    write_seconds,
)
from rlhpc.core.process import ProcessId
from tests.helpers.waiting import until


@pytest.fixture
def beat(tmp_path):
    started = Heartbeat(tmp_path / "heartbeats", 3, hang_timeout_seconds=4.0).start()
    yield started
    if heartbeat._current is not None:
        started.stop()


def test_the_first_record_is_there_at_once_and_tells_no_progress(beat, tmp_path):
    found = read_beat(tmp_path / "heartbeats", 3)
    assert (found.rank, found.process, found.touches, found.phase) == (3, ProcessId.own(), 0, "starting")
    assert found.main_thread == threading.main_thread().ident


@pytest.mark.heavy
def test_progress_is_written_with_its_phase_and_age(beat, tmp_path):
    time.sleep(0.3)
    before = time.monotonic()
    touch("rollout", 7)
    until(lambda: read_beat(tmp_path / "heartbeats", 3).touches == 1)
    found = read_beat(tmp_path / "heartbeats", 3)
    assert (found.phase, found.step) == ("rollout", 7)
    assert found.idle < time.monotonic() - before + 0.001, "since the touch, not since the start"


@pytest.mark.heavy
def test_a_phase_of_the_start_is_written_and_is_no_progress(beat, tmp_path):
    enter("importing")
    until(lambda: read_beat(tmp_path / "heartbeats", 3).phase == "importing")
    found = read_beat(tmp_path / "heartbeats", 3)
    assert (found.touches, found.step) == (0, None), "the time that a start may take still counts"


@pytest.mark.heavy
def test_without_progress_nothing_is_written(beat, tmp_path):
    touch("rollout")
    until(lambda: read_beat(tmp_path / "heartbeats", 3).touches == 1)
    before = (tmp_path / "heartbeats" / "rank-00003.json").stat().st_mtime_ns
    time.sleep(1.5)
    assert (tmp_path / "heartbeats" / "rank-00003.json").stat().st_mtime_ns == before


@pytest.mark.heavy
def test_steady_progress_is_written_once_in_a_while(beat, tmp_path):
    file, files, writes = tmp_path / "heartbeats" / "rank-00003.json", set(), set()

    def seen() -> int:
        touch("train")
        files.add(file.stat().st_mtime_ns)
        writes.add(beat._written)
        return len(files)

    until(lambda: seen() >= 3)
    first, *others = sorted(writes)
    for then in others:
        assert then - first >= 1.0
        first = then


def test_a_touch_is_cheap(beat):
    began = time.thread_time()
    for step in range(100_000):
        touch("train", step)
    assert time.thread_time() - began < 0.3, "3 µs each; a call that touches a file takes ten"


def test_without_a_heartbeat_a_touch_does_nothing():
    assert heartbeat._current is None
    touch("train")


def test_periods_follow_the_number_of_ranks_and_stay_within_the_silence():
    assert (look_seconds(8), look_seconds(4000), look_seconds(10**6)) == (0.5, 4.0, 10.0)
    assert (write_seconds(8, 1800), write_seconds(10_000, 1800), write_seconds(10_000, 60)) == (1.0, 50.0, 15.0)
    assert [message_seconds(size, 1800) for size in (8, 1024, 10**6)] == [0.5, 5.12, 30.0]
    assert message_seconds(10**6, 60) == 15.0


@pytest.mark.heavy
def test_a_request_is_answered_with_the_stacks_of_all_threads_and_the_collectives(beat, tmp_path):
    folder, end = tmp_path / "heartbeats", threading.Event()
    known = GroupState("0", "default_pg", "gloo", (0, 1), (Collective(5, "all_reduce", ((3, 2),), False),))
    beat.watch_collectives(lambda: [known])
    threading.Thread(target=lambda: end.wait(600), name="other", daemon=True).start()
    touch("train", 2)
    dump_file(folder).write_text("first\n")
    until(lambda: read_beat(folder, 3).collectives == "first")
    end.set()
    assert read_beat(folder, 3).stacks == "first"
    assert read_beat(folder, 3).phase == "train", "the record is of now"
    text = stacks_file(folder, 3).read_text()
    assert f"0x{threading.main_thread().ident:016x}" in text
    assert "in test_a_request_is_answered_with_the_stacks_of_all_threads_and_the_collectives" in text
    assert "in <lambda>" in text
    assert [GroupState.from_json(value) for value in json.loads(collectives_file(folder, 3).read_text())] == [known]


@pytest.mark.heavy
def test_stacks_are_at_no_time_gone(beat, tmp_path, monkeypatch):
    """The thread may have to stop for good at each of its calls, when native code takes the interpreter's lock."""
    folder = tmp_path / "heartbeats"
    dump_file(folder).write_text("first")
    until(lambda: read_beat(folder, 3).stacks == "first")
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
    dump_file(folder).write_text("second")
    until(lambda: read_beat(folder, 3).stacks == "second")
    assert len(sizes) >= 2
    assert all(sizes)


@pytest.mark.heavy
def test_each_request_is_answered_once(beat, tmp_path):
    folder = tmp_path / "heartbeats"
    dump_file(folder).write_text("first")
    until(lambda: read_beat(folder, 3).collectives == "first")
    stacks_file(folder, 3).unlink()
    beat._stacks = os.open(stacks_file(folder, 3), os.O_WRONLY | os.O_CREAT)
    time.sleep(1.2)
    assert stacks_file(folder, 3).read_text() == ""
    dump_file(folder).write_text("second")
    until(lambda: read_beat(folder, 3).collectives == "second")
    assert stacks_file(folder, 3).read_text() != ""


@pytest.mark.heavy
def test_collectives_that_cannot_be_determined_do_not_end_the_thread(beat, tmp_path):
    folder = tmp_path / "heartbeats"
    beat.watch_collectives(lambda: 1 / 0)
    dump_file(folder).write_text("first")
    until(lambda: read_beat(folder, 3).collectives == "first")
    touch("later")
    until(lambda: read_beat(folder, 3).phase == "later")


@pytest.mark.heavy
def test_a_folder_that_goes_away_does_not_end_the_rank(beat, tmp_path):
    folder = tmp_path / "heartbeats"
    folder.rename(tmp_path / "gone")
    touch("train")
    time.sleep(1.2)
    (tmp_path / "gone").rename(folder)
    touch("train again")
    until(lambda: read_beat(folder, 3).phase == "train again")


def test_the_end_is_written(beat, tmp_path):
    touch("done")
    beat.stop()
    found = read_beat(tmp_path / "heartbeats", 3)
    assert (found.ended, found.phase, found.touches) == (True, "done", 1)


def test_a_record_that_is_half_written_is_none(tmp_path):
    (tmp_path / "rank-00000.json").write_text('{"rank": 0, "no')
    assert read_beat(tmp_path, 0) is None
    assert read_beat(tmp_path, 1) is None


# The interpreter's lock is not released from before "in" is written until a line is read.
STUCK = """
import ctypes, sys, time
from pathlib import Path
from rlhpc.core.heartbeat import Heartbeat, touch
Heartbeat(Path(sys.argv[1]), 0).start()
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
def test_while_native_code_holds_the_lock_the_signal_writes_the_stack(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout.readline() == "in\n"
        dump_file(tmp_path).write_text("first")
        time.sleep(1)
        assert read_beat(tmp_path, 0).stacks == ""
        process.send_signal(DUMP_SIGNAL)
        until(lambda: "in in_native_code" in stacks_file(tmp_path, 0).read_text())
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "out\n"
        until(lambda: read_beat(tmp_path, 0).collectives == "first")
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
