"""Hangs of real ranks are named in time; slow ones are left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.core import env
from rlhpc.core.heartbeat import Beat, beat_file, dump_file, read_beat, read_beats, stacks_file
from rlhpc.core.process import ProcessId
from rlhpc.launch.supervise.hang_watch import Hang, HangLimits, HangWatch
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.waiting import PATIENCE
from tests.launch.hanging import RANKS, SILENCE, PollClock

LIMITS = HangLimits(100.0, 500.0)

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


def write(folder: Path, rank: int, touches: int, **fields) -> None:
    import json
    from dataclasses import asdict

    process = fields.pop("process", ProcessId(1, 2))
    beat = Beat(rank, "node0", process, 3, touches, "train", **fields)
    beat_file(folder, rank).write_text(json.dumps(asdict(beat)))


def test_one_rank_that_moves_is_enough(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 4, LIMITS, clock=clock)
    for rank in range(4):
        write(tmp_path, rank, 1)
    for touches in range(2, 30):
        assert clock.pass_by(watch, 90) is None
        write(tmp_path, 2, touches)
    assert dump_file(tmp_path).read_text() == ""


def test_before_the_first_progress_the_longer_limit_holds(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    write(tmp_path, 0, 0)
    clock.pass_by(watch, 499)
    assert dump_file(tmp_path).read_text() == ""
    clock.pass_by(watch, 2)
    assert dump_file(tmp_path).read_text() == "request-1\n"


def test_ranks_that_are_started_again_have_the_time_of_a_start(tmp_path):
    """Progress of a new process counts although it is less than that of the one before."""
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    write(tmp_path, 0, 50)
    clock.pass_by(watch, 90)
    watch.begin_again()
    clock.pass_by(watch, 300)
    assert dump_file(tmp_path).read_text() == ""
    write(tmp_path, 0, 1, process=ProcessId(7, 8))
    clock.pass_by(watch, 95)
    assert dump_file(tmp_path).read_text() == ""
    clock.pass_by(watch, 10)
    assert dump_file(tmp_path).read_text() == "request-1\n"


def test_the_age_of_the_progress_counts_from_when_it_was_made(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    clock.pass_by(watch, 300)
    write(tmp_path, 0, 5, idle=40.0)  # written 40 s after it, by a rank that may not write oftener
    clock.pass_by(watch, 1)
    assert watch.silent_for == pytest.approx(40)


def test_nobody_answers_a_request(tmp_path):
    clock = Clock()
    signals: list[str] = []
    watch = HangWatch(tmp_path, 2, LIMITS, lambda: signals.append("all"), clock)
    write(tmp_path, 0, 5)
    assert clock.pass_by(watch, 102) is None
    assert dump_file(tmp_path).read_text() == "request-1\n"
    assert clock.pass_by(watch, 4) is None, "ranks still have time to answer"
    assert signals == ["all"], "once"
    hang = clock.pass_by(watch, 2)
    assert hang.message == "rank 0 on node0 does not answer (stopped, or its node is out of reach; last seen in train)"
    assert (tmp_path / "hang.txt").read_text() == hang.report
    assert re.search(r"^1 +\? +absent$", hang.report, re.M)
    header, *rows = (line for line in hang.report.splitlines() if re.match(r"rank +node|\d ", line))
    assert [row.index("train") for row in rows[:1]] == [header.index("phase")], "columns are as wide as their widest"


def test_a_watch_that_was_kept_waiting_still_waits_for_answers_to_its_signal(tmp_path):
    clock = Clock()
    signals: list[str] = []
    watch = HangWatch(tmp_path, 1, LIMITS, lambda: signals.append("all"), clock)
    write(tmp_path, 0, 5)
    clock.pass_by(watch, 102)
    clock.now += 10
    assert watch.poll() is None
    assert signals == ["all"]
    assert clock.pass_by(watch, 2) is None
    assert clock.pass_by(watch, 2) is not None


def test_stacks_that_still_grow_are_waited_for(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    write(tmp_path, 0, 5)
    clock.pass_by(watch, 105)
    hang, seconds = None, 0
    while hang is None:
        with open(stacks_file(tmp_path, 0), "a") as file:
            file.write("a piece\n")
        hang, seconds = clock.pass_by(watch, 1), seconds + 1
    assert 4 <= seconds <= 6, "but not forever"


def test_a_rank_that_moves_again_when_asked_was_only_slow(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    write(tmp_path, 0, 5)
    clock.pass_by(watch, 102)
    write(tmp_path, 0, 6)
    assert clock.pass_by(watch, 90) is None
    assert dump_file(tmp_path).read_text() == "request-1\n"
    clock.pass_by(watch, 15)
    assert dump_file(tmp_path).read_text() == "request-2\n"


def test_a_job_that_was_suspended_has_not_hung(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, 1, LIMITS, clock=clock)
    write(tmp_path, 0, 5)
    clock.pass_by(watch, 50)
    clock.now += 3600
    clock.pass_by(watch, 45)
    assert dump_file(tmp_path).read_text() == ""
    clock.pass_by(watch, 10)
    assert dump_file(tmp_path).read_text() == "request-1\n"


def test_many_ranks_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    """As if each record took a millisecond to read."""
    count, read = 3000, []

    def slowly(folder: Path, rank: int) -> Beat | None:
        read.append(rank)
        return read_beat(folder, rank)

    monkeypatch.setattr("rlhpc.launch.supervise.hang_watch.read_beat", slowly)
    monkeypatch.setattr("rlhpc.launch.supervise.hang_watch.time", SimpleNamespace(monotonic=lambda: len(read) / 1000))
    watch = HangWatch(tmp_path, count, LIMITS, clock=Clock())
    for rank in range(count):
        write(tmp_path, rank, 1)
    polls = 0
    while len(watch._beats) < count:
        before = len(read)
        assert watch.poll() is None
        assert len(read) - before <= 101, "a tenth of a second"
        polls += 1
    assert polls <= 31
    for _ in range(1000):
        watch.poll()
    assert read == list(range(count)), "until the next pass, polls only look at the clock"


@pytest.fixture
def server():
    opened = StoreServer.open(host="127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture
def ranks(tmp_path, server):
    """start(scenario): four ranks of tests.launch.hanging."""
    started: list[subprocess.Popen] = []

    def start(*scenario: str) -> None:
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
            command = [sys.executable, "-W", "ignore", "-m", "tests.launch.hanging", str(tmp_path), *scenario]
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


def wait_for_hang(start: Callable[..., None], scenario: str, folder: Path, server: StoreServer | None) -> Hang:
    """The hang, which must come within the silence and ten seconds. Without ``server`` heartbeats are files."""
    clock, deadline = PollClock(folder), time.monotonic() + PATIENCE
    watch = HangWatch(folder, RANKS, HangLimits(SILENCE, 120.0), clock=clock)
    if server is None:
        start(scenario, "files")
    else:
        watch.listen(server.beats)
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
        pytest.param(  # across nodes in tests/slurm/test_hang.py
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
    assert not list(tmp_path.glob("rank-*[0-9].json")), "heartbeats went through the store"
    assert set(read_beats(tmp_path)) == set(range(RANKS))
    assert re.fullmatch(message, found.message), found.message
    assert found.rank == rank
    assert found.node
    assert found.report.startswith(found.message)
    assert all(re.search(rf"^{each} ", found.report, re.M) for each in range(RANKS)), "a row for each"
    if scenario != "stopped":
        assert "hread 0x" in found.report or scenario == "ending"


@pytest.mark.ranks
@pytest.mark.long
def test_the_blocking_rank_is_named_by_files_alone(ranks, tmp_path):
    found = wait_for_hang(ranks, "stopped", tmp_path, None)
    assert re.match(r"rank 2 on \S+ does not answer \(stopped, .*\) while 3 ranks wait for it", found.message)


@pytest.mark.ranks
def test_ranks_that_wait_for_a_slow_peer_have_not_hung(ranks, tmp_path):
    """For the watch a step of the slow one lasts a second: by its time the others wait for twice the limit."""
    limit, clock, deadline = 20.0, Clock(), time.monotonic() + PATIENCE
    watch = HangWatch(tmp_path, RANKS, HangLimits(limit, 120.0), clock=clock)
    ranks("healthy", "files")
    steps = 0
    while steps < 2 * limit:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        beat = read_beat(tmp_path, 0)
        clock.now += (beat.touches if beat else 0) - steps
        steps = beat.touches if beat else 0
        assert watch.poll() is None
    assert read_beat(tmp_path, 1).touches <= 4, "it makes no progress of its own"
    assert dump_file(tmp_path).read_text() == ""
