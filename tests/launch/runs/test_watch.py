"""Panels of `rlhpc watch` on the files of a recorded run, and the command on a real terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlhpc.cli.main import main
from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.core.heartbeat import Heartbeat, beats_file, read_beat, write_beats
from rlhpc.launch.run_lock import locked
from rlhpc.launch.runs.run_registry import RunEntry, read_run
from rlhpc.launch.runs.status import run_status
from rlhpc.launch.runs.watch import Watched, ranges, sparkline, view
from rlhpc.observe.alerts.record import Alert, AlertFile
from tests.observe.alerts.series import SERIES, recorded

RECORDS = recorded(SERIES / "demo-seed-0.jsonl.gz")
RL = [record for record in RECORDS if record["phase"] == "rl"]  # from step 0 on, the first validation
WARM_UP = RECORDS[: -len(RL)]
KNOWN = {"job_id": "", "restart_count": 0, "nodes": ("node1",), "world_size": 4, "saved_step": -1}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunEntry:
    """A run of four ranks in RL step 60: three update, one still generates."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = RunFolder(tmp_path / "demo")
    attempt = attempts.begin(folder, **KNOWN)
    folder.config.write_text("name: demo\n")
    write(folder, [*WARM_UP, *RL[:61]])
    for rank in range(4):
        beat = Heartbeat(attempt.heartbeats, rank)
        beat.touch("update" if rank != 2 else "rollout", 60)
        beat.write()
    return read_run(folder.path)


def write(folder: RunFolder, records: Sequence[dict]) -> None:
    temporary = folder.path / "new"
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    temporary.replace(folder.metrics)


def screen(
    run: RunEntry, columns: int = 80, lines: int = 24, encoding: str = "utf-8", watched: Watched | None = None
) -> list[str]:
    """What a terminal of this size shows."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    console = Console(file=file, width=columns, height=lines, record=True, force_terminal=True, legacy_windows=False)
    snapshot = Watched(run).snapshot(run_status(run, None))
    console.print(view(snapshot, console), highlight=False)
    return console.export_text().splitlines()


def test_a_small_terminal_shows_metrics_ranks_and_alerts(run: RunEntry) -> None:
    with locked(run.folder):
        shown = screen(run)
    assert len(shown) <= 24
    assert all(cell_len(line) <= 80 for line in shown)
    text = "\n".join(shown)
    assert shown[0] == "demo: running"
    assert shown[1].startswith("rl step 60/100 | reward ")
    assert shown[2].count("=") == 48
    last = RL[60]
    for label, value in (
        ("reward", f"{last['reward/mean']:.3f}"),
        ("KL", f"{last['kl']:.3g}"),
        ("tokens/s", f"{last['perf/tokens_per_second']:,.0f}"),
        ("length", f"{last['response/length_mean']:,.0f}"),
    ):
        assert re.search(rf"│ {label} +{re.escape(value)} [▁▂▃▄▅▆▇█]{{40,}} ", text), label
    assert "│ rollout, step 60: rank 2 " in text
    assert "│ update, step 60: ranks 0-1, 3 " in text
    assert re.search(r"alerts ─+╮\n│ none ", text)
    assert "loss" not in text


@pytest.mark.parametrize("size", [(80, 24), (80, 10), (40, 24), (200, 60)])
def test_panels_fit_any_terminal(run: RunEntry, size: tuple[int, int]) -> None:
    file = AlertFile(run.folder)
    for step in range(12):
        file.add(Alert(time.time(), "rl", step, "kl", "warning", f"kl is {step}: " + "high " * 30))
    shown = screen(run, *size)
    assert len(shown) <= max(size[1], 13)
    assert all(cell_len(line) <= size[0] for line in shown)
    assert "rl step 11, kl" in "\n".join(shown) or size[0] == 40


def test_alerts_and_stragglers_are_shown_without_control_characters(run: RunEntry) -> None:
    AlertFile(run.folder).add(Alert(time.time(), "rl", 59, "kl", "error", "kl \x1b[31mis 3", "save"))
    write(run.folder, [{**RL[60], "perf/straggler_rank": 2.0, "perf/straggler_ratio": 1.4}])
    text = "\n".join(screen(run))
    assert "rank 2 takes 1.40 times as long per token as the others" in text
    assert "rl step 59, kl: kl \N{REPLACEMENT CHARACTER}[31mis 3 -> save" in text


def test_a_terminal_without_unicode_has_plain_marks(run: RunEntry) -> None:
    text = "\n".join(screen(run, encoding="ascii"))
    assert re.search(r"reward +\S+ [_.\-~=+*#]{40,} ", text)
    assert "\\u" not in text


def test_ranks_without_progress_are_named(run: RunEntry) -> None:
    for file in (run.folder.attempt(1).heartbeats).glob("rank-00002.json"):
        os.utime(file, (time.time() - 100, time.time() - 100))
    assert re.search(r"rollout, step 60: rank 2 \| 1 min 4\d s without progress", "\n".join(screen(run)))


def test_the_launchers_file_of_all_ranks_is_read_in_place_of_theirs(run: RunEntry) -> None:
    folder = run.folder.attempt(1).heartbeats
    beats = [beat for rank in range(4) if (beat := read_beat(folder, rank))]
    write_beats(folder, [replace(beat, phase="checkpoint", idle=20.0 * beat.rank) for beat in beats])
    os.utime(beats_file(folder), (time.time() - 60, time.time() - 60))
    text = "\n".join(screen(run))
    assert "checkpoint, step 60: ranks 0-3" in text
    assert "ranks 0-3 | 2 min 00 s without progress" in text, "60 s when it was written, 60 s ago"
    assert "rollout, step" not in text


def test_a_resumed_run_takes_steps_again(run: RunEntry) -> None:
    watched = Watched(run)
    before = watched.snapshot(run_status(run, None)).series["reward/mean"]
    assert list(before) == [record["reward/mean"] for record in RL[1:61]]
    again = [{**record, "time": record["time"] + 1000, "reward/mean": 7.0} for record in RL[41:43]]
    write(run.folder, [*WARM_UP, *RL[:41], *again])
    after = watched.snapshot(run_status(run, None)).series["reward/mean"]
    assert list(after) == [*before[:40], 7.0, 7.0]


def test_a_run_without_steps_is_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.create()
    text = "\n".join(screen(read_run(folder.path)))
    assert "never started" in text
    assert "no steps" in text
    assert "no heartbeats" in text


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(8000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, float("nan"), 2.0], 3) == "▁ █"
    assert sparkline([3.0, 3.0], 9) == "▁▁"
    assert sparkline([0, 7], 2, ascii_only=True) == "_#"
    assert sparkline([], 9) == sparkline([float("nan")], 9) == sparkline([1e308, -1e308], 9) == ""


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


def test_without_a_terminal_the_state_is_printed_once(run: RunEntry, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--once"]):
        sys.argv = ["rlhpc", "watch", str(run.folder.path), *options]
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert shown.startswith("demo: killed\nrl step 60/100 | ")
        assert "\nmetrics ------" in shown
        assert "\x1b" not in shown
        assert not [line for line in shown.splitlines() if line != line.rstrip()]


def test_the_former_option_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv = ["rlhpc", "status", "--watch"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "rlhpc: --watch: was replaced; use `rlhpc watch [RUN]`\n"


@pytest.fixture
def terminal(run: RunEntry) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`rlhpc watch` on a terminal of 80 × 24 characters; the run is going."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "rlhpc.cli.main", "watch", str(run.folder.path)]
    with locked(run.folder):
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        os.close(theirs)
        yield process, ours
    process.kill()
    process.wait()
    os.close(ours)


def shown_until(ours: int, text: str, seconds: float = 60.0) -> str:
    """What the terminal shows until it has shown ``text``."""
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown:
        assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(ours, 65536).decode(errors="replace")
    return shown


@pytest.mark.heavy
def test_a_real_terminal_follows_the_run_until_ctrl_c(
    run: RunEntry, terminal: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, ours = terminal
    assert "\x1b[?1049h" in shown_until(ours, "rl step 60/100")  # on a screen of its own
    with open(run.folder.metrics, "a") as file:
        file.write(json.dumps({**RL[61], "kl": 123.0}) + "\n")
    shown = shown_until(ours, "rl step 61/100")
    assert "KL 123" in shown + shown_until(ours, "alerts")
    process.send_signal(signal.SIGINT)
    shown_until(ours, "\x1b[?1049l")  # back to the normal screen
    assert process.wait(60) == 0


@pytest.mark.heavy
def test_it_ends_with_the_run(run: RunEntry) -> None:
    """The last picture stays on the normal screen."""
    ours, theirs = pty.openpty()
    with locked(run.folder):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhpc.cli.main", "watch", str(run.folder.path)],
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        os.close(theirs)
        shown_until(ours, "rl step 60/100")
        attempts.end(run.folder.attempt(1), Verdict(time.time(), "crash", "died", "stop", 2, "node1"))
    shown = shown_until(ours, "a rank crashed").partition("\x1b[?1049l")[2]
    assert "failed" in shown
    assert process.wait(60) == 0
    os.close(ours)
