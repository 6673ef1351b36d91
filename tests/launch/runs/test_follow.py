"""`rlhpc status RUN --follow` on runs of this machine: progress, phases of ranks, and the end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rlhpc.cli.main import main
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Beat, beats_file, write_beats
from rlhpc.core.process import ProcessId
from rlhpc.launch.run_lock import locked
from rlhpc.launch.runs.follow import follow
from rlhpc.launch.runs.rank_phases import ranges, rank_groups, ranks_line
from rlhpc.launch.runs.run_registry import RunEntry, read_run
from tests.observe.alerts.series import SERIES, recorded

RL = [record for record in recorded(SERIES / "demo-seed-0.jsonl.gz") if record["phase"] == "rl"]
KNOWN = {"job_id": "", "restart_count": 0, "nodes": ("node1",), "world_size": 4, "saved_step": -1}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    """A run of four ranks in RL step 60: three update, one still generates."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = RunFolder(tmp_path / "demo")
    attempts.begin(folder, **KNOWN)
    folder.config.write_text("name: demo\n")
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in RL[:61]))
    found = read_run(folder.path)
    write_phases(found, ["update", "update", "rollout", "update"], 60)
    return found


def write_phases(run: RunEntry, phases: Sequence[str], step: int, **changes: float) -> None:
    """The launcher's file of all ranks."""
    process = ProcessId.own()
    beats = [Beat(rank, "here", process, 1, 1, phase, step, **changes) for rank, phase in enumerate(phases)]
    write_beats(run.folder.attempt(1).heartbeats, beats)


def end(run: RunEntry, cause: str, action: str) -> None:
    attempts.end(run.folder.attempt(1), Verdict(time.time(), cause, "died", action, 2, "node1"))


def test_a_line_has_the_ranks_by_phase(run: RunEntry) -> None:
    assert ranks_line(run) == "rollout, step 60: rank 2 | update, step 60: ranks 0-1, 3"
    write_phases(run, [f"phase {rank}" for rank in range(8)], 1)
    assert ranks_line(run).endswith("phase 5, step 1: rank 5 | …")
    write_phases(run, ["a", "b"] * 20, 1)
    assert ranks_line(run).startswith("a, step 1: ranks 0, 2, 4, 6, 8, 10, 12, 14, … | b, step 1: ranks 1, ")


def test_ranks_without_progress_are_named(run: RunEntry) -> None:
    write_phases(run, ["checkpoint"] * 4, 60, idle=60.0)
    os.utime(beats_file(run.folder.attempt(1).heartbeats), (time.time() - 60, time.time() - 60))
    assert rank_groups(run) == ["checkpoint, step 60: ranks 0-3, 2 min 00 s without progress"], "then and since"
    write_phases(run, ["end"] * 4, 60, idle=60.0, ended=True)
    assert rank_groups(run) == ["ended, step 60: ranks 0-3"]


def test_a_run_without_heartbeats_has_no_line(tmp_path: Path, run: RunEntry) -> None:
    beats_file(run.folder.attempt(1).heartbeats).unlink()
    (tmp_path / "new").mkdir()
    assert ranks_line(run) == ranks_line(RunEntry(RunFolder(tmp_path / "new"), None)) == ""


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]
    assert ranges([]) == []


@pytest.mark.parametrize(
    ("cause", "action", "code", "words"),
    [
        ("finished", "none", 0, "rlhpc: finished: {folder}"),
        ("stopped", "stop", 0, "rlhpc: demo is over: stopped on request"),
        ("crash", "stop", 1, "rlhpc: demo is over: a rank crashed (rank 2 on node1): died -> stopped"),
        ("user", "stop", 2, "rlhpc: demo is over: wrong input, or an error in the user's code"),
    ],
)
def test_a_run_that_is_over_shows_its_last_step_and_end(
    run: RunEntry, cause: str, action: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, cause, action)
    assert follow(run) == code
    shown = capsys.readouterr()
    assert shown.out.startswith("rl step 60/100 | reward ")
    assert words.format(folder=run.folder.path) in (shown.out if code == 0 and cause == "finished" else shown.err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["watch", "demo", "--once"], "watch: this command was removed; use `rlhpc status RUN --follow`, or "),
        (["status", "--follow"], "--follow: shows one run, not as JSON; give one RUN, and leave --json out"),
        (["status", "a", "--follow", "--json"], "--follow: shows one run, not as JSON; give one RUN, and leave --json"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhpc", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith(f"rlhpc: {message}")) == (2, True), line


@contextmanager
def followed(run: RunEntry) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, and its terminal of 24 × 80 characters."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhpc.cli.main", "status", str(run.folder.path), "--follow"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown_until(ours: int, text: str, seconds: float = 60.0) -> str:
    """Output of the terminal up to ``text``."""
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown:
        assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(ours, 65536).decode(errors="replace")
    return shown


@pytest.mark.heavy
def test_a_terminal_follows_the_run_until_ctrl_c(run: RunEntry) -> None:
    with locked(run.folder), followed(run) as (process, ours):
        assert "rl step 60/100 | reward " in shown_until(ours, "rollout, step 60: rank 2 | update, step 60: ranks 0-1")
        write_phases(run, ["checkpoint"] * 4, 61)
        with open(run.folder.metrics, "a") as file:
            file.write(json.dumps({**RL[61], "kl": 123.0}) + "\n")
        with open(run.folder.alerts, "a") as file:
            file.write(json.dumps({"phase": "rl", "step": 61, "rule": "kl", "message": "kl is 123"}) + "\n")
        shown = shown_until(ours, "checkpoint, step 61: ranks 0-3")
        assert "rl step 61/100 | reward " in shown
        assert "KL 123" in shown
        assert "rlhpc: warning: kl is 123" in shown
        process.send_signal(signal.SIGINT)
        shown_until(ours, "rlhpc: demo keeps running; end it with Ctrl-C where it was started")
        assert process.wait(60) == 130


@pytest.mark.heavy
def test_it_ends_with_the_run(run: RunEntry) -> None:
    with ExitStack() as launcher:
        launcher.enter_context(locked(run.folder))
        with followed(run) as (process, ours):
            shown_until(ours, "rl step 60/100")
            end(run, "crash", "stop")
            assert process.poll() is None, "its launcher is still there"
            launcher.close()
            shown_until(ours, "rlhpc: demo is over: a rank crashed")
            assert process.wait(60) == 1
