"""Hangs of real ranks are named in time; slow ones are left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rlhpc.core import env
from rlhpc.core.heartbeat import Beat, beats_file, read_beats, stacks_file
from rlhpc.core.process import ProcessId
from rlhpc.launch.supervise.hang_watch import Hang, HangWatch, WatchedRanks
from rlhpc.launch.supervise.job_store import ReceivedBeats, StoreServer
from tests.helpers.waiting import PATIENCE
from tests.launch.hanging import RANKS, SILENCE, PollClock

ROOT = Path(__file__).parents[3]


class Clock:
    """Time as the watch sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_by(self, watch: HangWatch, seconds: float) -> Hang | None:
        """So much time, in which the watch is polled as it is meant to be; what the last poll returned."""
        found = None
        for _ in range(int(seconds)):
            self.now += 1
            found = watch.poll()
        return found

    def __call__(self) -> float:
        return self.now


def of_ranks(count: int) -> WatchedRanks:
    return WatchedRanks(count, 100.0, 500.0)


def send(received: ReceivedBeats, rank: int, touches: int, **fields) -> bytes:
    """A record of a rank, as the store receives it; its answer."""
    beat = Beat(rank, "node0", fields.pop("process", ProcessId(1, 2)), 3, touches, "train", **fields)
    return received.receive(rank, json.dumps(asdict(beat)).encode())


@pytest.fixture
def received() -> ReceivedBeats:
    return ReceivedBeats()


def test_one_rank_that_moves_is_enough(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(4), received, clock=clock)
    for rank in range(4):
        send(received, rank, 1)
    for touches in range(2, 30):
        assert clock.pass_by(watch, 90) is None
        send(received, 2, touches)
    assert received.request == b""


def test_before_the_first_progress_the_longer_limit_holds(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    send(received, 0, 0)
    clock.pass_by(watch, 499)
    assert received.request == b""
    clock.pass_by(watch, 2)
    assert received.request == b"request-1"


def test_ranks_that_are_started_again_have_the_time_of_a_start(tmp_path, received):
    """Progress of a new process counts although it is less than that of the one before."""
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    send(received, 0, 50)
    clock.pass_by(watch, 90)
    watch.begin_again()
    clock.pass_by(watch, 300)
    assert received.request == b""
    send(received, 0, 1, process=ProcessId(7, 8))
    clock.pass_by(watch, 95)
    assert received.request == b""
    clock.pass_by(watch, 10)
    assert received.request == b"request-1"


def test_the_age_of_the_progress_counts_from_when_it_was_made(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    clock.pass_by(watch, 300)
    send(received, 0, 5, idle=40.0)  # written 40 s after it, by a rank that may not write oftener
    clock.pass_by(watch, 1)
    assert watch.silent_for == pytest.approx(40)


def test_nobody_answers_a_request(tmp_path, received):
    clock = Clock()
    signals: list[str] = []
    watch = HangWatch(tmp_path, of_ranks(2), received, lambda: signals.append("all"), clock)
    send(received, 0, 5)
    assert clock.pass_by(watch, 102) is None
    assert received.request == b"request-1"
    assert clock.pass_by(watch, 4) is None, "ranks still have time to answer"
    assert signals == ["all"], "once"
    hang = clock.pass_by(watch, 2)
    assert hang.message == "rank 0 on node0 does not answer (stopped, or its node is out of reach; last seen in train)"
    assert (tmp_path / "hang.txt").read_text() == hang.report
    assert re.search(r"^1 +\? +absent$", hang.report, re.M)
    header, *rows = (line for line in hang.report.splitlines() if re.match(r"rank +node|\d ", line))
    assert [row.index("train") for row in rows[:1]] == [header.index("phase")], "columns are as wide as their widest"


def test_a_watch_that_was_kept_waiting_still_waits_for_answers_to_its_signal(tmp_path, received):
    clock = Clock()
    signals: list[str] = []
    watch = HangWatch(tmp_path, of_ranks(1), received, lambda: signals.append("all"), clock)
    send(received, 0, 5)
    clock.pass_by(watch, 102)
    clock.now += 10
    assert watch.poll() is None
    assert signals == ["all"]
    assert clock.pass_by(watch, 2) is None
    assert clock.pass_by(watch, 2) is not None


def test_stacks_that_still_grow_are_waited_for(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    send(received, 0, 5)
    clock.pass_by(watch, 105)
    hang, seconds = None, 0
    while hang is None:
        with open(stacks_file(tmp_path, 0), "a") as file:
            file.write("a piece\n")
        hang, seconds = clock.pass_by(watch, 1), seconds + 1
    assert 4 <= seconds <= 6, "but not forever"


def test_a_rank_that_moves_again_when_asked_was_only_slow(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    send(received, 0, 5)
    clock.pass_by(watch, 102)
    send(received, 0, 6)
    assert clock.pass_by(watch, 90) is None
    assert received.request == b"request-1"
    clock.pass_by(watch, 15)
    assert received.request == b"request-2"


def test_a_job_that_was_suspended_has_not_hung(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(1), received, clock=clock)
    send(received, 0, 5)
    clock.pass_by(watch, 50)
    clock.now += 3600
    clock.pass_by(watch, 45)
    assert received.request == b""
    clock.pass_by(watch, 10)
    assert received.request == b"request-1"


def test_a_hang_is_asked_for_and_answered_through_the_store(tmp_path, received):
    clock = Clock()
    watch = HangWatch(tmp_path, of_ranks(2), received, clock=clock)
    for rank in (0, 1):
        assert send(received, rank, 5) == b""
    clock.pass_by(watch, 102)
    for rank in (0, 1):
        assert send(received, rank, 5, stacks="request-1", collectives="request-1") == b"request-1"
    assert clock.pass_by(watch, 1) is not None
    assert {one.collectives for one in read_beats(tmp_path).values()} == {"request-1"}


def test_the_file_of_all_ranks_is_written_once_a_minute_for_a_thousand(tmp_path, received, monkeypatch):
    clock, written = Clock(), []
    monkeypatch.setattr("rlhpc.launch.supervise.hang_watch.write_beats", lambda _, beats: written.append(len(beats)))
    many = HangWatch(tmp_path, WatchedRanks(1024, 1800.0), received, clock=clock)
    clock.pass_by(many, 10)
    assert not written, "no rank is known"
    for rank in range(1024):
        send(received, rank, 1)
    clock.pass_by(many, 600)
    assert written == [1024] * 10


def test_the_file_of_all_ranks_has_their_ages_as_of_now(tmp_path, received):
    watch = HangWatch(tmp_path, of_ranks(2), received)
    began = time.monotonic()
    send(received, 1, 1, idle=40.0)
    time.sleep(0.1)
    watch.close()
    [(rank, found)] = read_beats(tmp_path).items()
    assert rank == 1
    assert 40.1 <= found.idle <= 40 + time.monotonic() - began + 0.001


def test_lines_that_are_being_written_are_left_out(tmp_path, received):
    for rank in (0, 1):
        send(received, rank, 1)
    HangWatch(tmp_path, of_ranks(2), received).close()
    text = beats_file(tmp_path).read_text()
    beats_file(tmp_path).write_text(text[:-30])
    assert set(read_beats(tmp_path)) == {0}


@pytest.fixture
def ranks(tmp_path, server):
    """start(scenario): four ranks of tests.launch.hanging."""
    started: list[subprocess.Popen] = []

    def start(scenario: str) -> None:
        for rank in range(RANKS):
            settings = {
                env.RANK: str(rank),
                env.LOCAL_RANK: str(rank),
                env.WORLD_SIZE: str(RANKS),
                env.OMP_NUM_THREADS: "1",
                env.TORCHDYNAMO_DISABLE: "1",
                env.GLOO_SOCKET_IFNAME: "lo",
                env.RLHPC_STORE: f"127.0.0.1:{server.port}",
                env.RLHPC_STORE_SECRET: server.secret.hex(),
            }
            command = [sys.executable, "-W", "ignore", "-m", "tests.launch.hanging", str(tmp_path), scenario]
            with open(tmp_path / f"{rank}.log", "wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **settings},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not any(ProcessId.of(process.pid) for process in started)


def wait_for_hang(start: Callable[..., None], scenario: str, folder: Path, server: StoreServer) -> Hang:
    """The hang, which must come within the silence and ten seconds."""
    clock, deadline = PollClock(folder), time.monotonic() + PATIENCE
    watch = HangWatch(folder, WatchedRanks(RANKS, SILENCE, 120.0), server.beats, clock=clock)
    start(scenario)
    while (found := watch.poll()) is None:
        assert time.monotonic() < deadline
        clock.pass_by()
    assert watch.silent_for < SILENCE + 10
    print(found.report)
    return found


DEFAULT_GROUP = "while 3 ranks wait for it in all_reduce #4 of the default group"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("scenario", "rank", "message"),
    [
        pytest.param(
            "sleeping",
            1,
            rf"rank 1 on \S+ is in rollout \(user_reward: \S+/hanging\.py:\d+\) {DEFAULT_GROUP}",
            marks=pytest.mark.long,
        ),
        ("stopped", 2, rf"rank 2 on \S+ does not answer \(stopped, .*\) {DEFAULT_GROUP}"),
        pytest.param(
            "spinning",
            3,
            rf"rank 3 on \S+ is in train \(spinning: \S+/hanging\.py:\d+\) {DEFAULT_GROUP}",
            marks=pytest.mark.long,
        ),
        pytest.param(  # across nodes in tests/slurm/test_recovery.py
            "native",
            3,
            rf"rank 3 on \S+ is stuck in native code \(native: \S+/hanging\.py:\d+; .*\) {DEFAULT_GROUP}",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other_collective",
            2,
            r"rank 2 on \S+ calls broadcast in train \(other_collective: \S+\) where 3 ranks call all_reduce: #4 of .*",
            marks=pytest.mark.long,
        ),
        (
            "skipping",
            1,
            r"rank 1 on \S+ waits in all_reduce #4 of the default group in train \(main: .*\)"
            r" after 3 collectives of group TENSOR_MODEL_PARALLEL_GROUP where 2 ranks got there after 4",
        ),
        pytest.param("ending", 0, rf"rank 0 on \S+ has ended {DEFAULT_GROUP}", marks=pytest.mark.long),
        pytest.param(
            "never_joining",
            1,
            r"rank 1 on \S+ is in join \(user_reward: \S+:\d+\) while 3 ranks wait",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_blocking_rank_is_named(ranks, server, scenario, rank, message, tmp_path):
    found = wait_for_hang(ranks, scenario, tmp_path, server)
    assert set(read_beats(tmp_path)) == set(range(RANKS))
    assert re.fullmatch(message, found.message), found.message
    assert found.rank == rank
    assert found.node
    assert found.report.startswith(found.message)
    assert all(re.search(rf"^{each} ", found.report, re.M) for each in range(RANKS)), "a row for each"
    if scenario != "stopped":
        assert "hread 0x" in found.report or scenario == "ending"


@pytest.mark.ranks
def test_ranks_that_wait_for_a_slow_peer_have_not_hung(ranks, server, tmp_path):
    """For the watch a step of the slow one lasts a second: by its time the others wait for twice the limit."""
    limit, clock, deadline = 20.0, Clock(), time.monotonic() + PATIENCE
    watch = HangWatch(tmp_path, WatchedRanks(RANKS, limit, 120.0), server.beats, clock=clock)

    def touches(rank: int) -> int:
        record = server.beats.record(rank)
        return json.loads(record[0])["touches"] if record else 0

    ranks("healthy")
    steps = 0
    while steps < 2 * limit:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        now = touches(0)
        clock.now, steps = clock.now + now - steps, now
        assert watch.poll() is None
    assert touches(1) <= 4, "it makes no progress of its own"
    assert server.beats.request == b""
