"""The progress line, the duration left, and what a run adds to its output."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.text import duration
from rlhpc.observe.progress import Display, RunOutput, progress_line, start_line


def step(phase: str, number: int, time: float, **metrics: float) -> dict:
    return {"phase": phase, "step": number, "total_steps": 10, "time": time, **metrics}


def test_before_the_first_step():
    assert [start_line(phase) for phase in ("", "starting", "importing", "log_probs")] == [
        "starting",
        "starting",
        "starting: importing",
        "starting: log-probs",
    ]


def test_metrics_of_the_phase_and_the_time_left():
    records = [
        step("sft", 10, 0.0, **{"loss": 2.5}),
        step("rl", 1, 100.0, **{"reward/mean": 0.25, "validation/reward_mean": 0.125}),
        step("rl", 3, 120.0, **{"reward/mean": 0.5, "perf/tokens_per_second": 4321.0, "loss": 0.1}),
    ]
    sampled = {"kl": 0.01234, "response/length_mean": 1234.4, "advantage/zero_fraction": 0.25}
    assert progress_line(records[:1]) == "sft step 10/10 | loss 2.500"
    line = "rl step 3/10 | reward 0.500 | validation 12.5% | 4,321 tokens/s | 1 min 10 s left"
    assert progress_line(records) == line
    records[-1] |= sampled
    rest = line.removeprefix("rl step 3/10 | reward 0.500")
    expected = f"rl step 3/10 | reward 0.500 | KL 0.0123 | length 1,234 | 25% zero advantages{rest}"
    assert progress_line(records) == expected


def test_skipped_updates_are_counted_over_all_steps():
    records = [
        step("sft", 10, 0.0, skipped_updates=1.0),
        step("rl", 1, 1.0, **{"skipped_updates": 2.0, "critic/skipped_updates": 1.0}),
        step("rl", 2, 2.0, skipped_updates=0.0),
    ]
    assert progress_line(records) == "rl step 2/10 | 4 update(s) skipped | 8 s left"
    assert "skipped" not in progress_line(records[2:])


def test_one_step_is_extrapolated_by_its_own_time():
    assert progress_line([step("rl", 4, 0.0, **{"perf/step_seconds": 2.0})]).endswith("12 s left")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def write(file: Path, *lines: dict) -> None:
    with open(file, "a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def test_only_what_a_run_adds_is_its_output(tmp_path):
    """A resumed run replaces metrics.jsonl, and an attempt's first alert alerts.jsonl: what was in them is not new."""
    folder, alert = RunFolder(tmp_path), {"phase": "rl", "step": 1, "time": 1.0, "rule": "kl"}
    write(folder.metrics, step("rl", 1, 1.0), step("rl", 2, 2.0))
    write(folder.alerts, alert)
    output = RunOutput(folder)
    folder.metrics.unlink()
    write(folder.metrics, step("rl", 1, 1.0))
    folder.alerts.unlink()
    write(folder.alerts, alert, {**alert, "rule": "length"})
    assert output.read() == ([], [{**alert, "rule": "length"}])
    write(folder.metrics, step("rl", 2, 9.0))
    assert output.read() == ([step("rl", 2, 9.0)], [])


def test_a_file_that_cannot_be_read_is_reported_once(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    write(folder.alerts, {"rule": "kl"})
    output = RunOutput(folder)
    write(folder.alerts, {"rule": "length"})
    assert output.read() == ([], [{"rule": "length"}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhpc: warning: continuing without reading metrics and alerts, which failed: IsADirectory")
    folder.metrics.rmdir()
    write(folder.metrics, step("rl", 1, 1.0))
    assert output.read() == ([step("rl", 1, 1.0)], [])


def test_steps_that_come_again_count_once(capsys):
    records = [step("rl", number, float(number), skipped_updates=1.0) for number in (1, 2, 3)]
    with Display(plain_seconds=0.0, past=records[:2]) as display:
        display.update([records[2], step("rl", 2, 9.0)])
    assert capsys.readouterr().out == "rl step 2/10 | 1 update(s) skipped | 1 min 04 s left\n"


VALUES = [None, "0.5", "nan", [1], {}, True, math.nan, math.inf, -math.inf, 10**400, 0, -1e300]


@pytest.mark.parametrize(
    "name", ["reward/mean", "kl", "perf/tokens_per_second", "perf/step_seconds", "time", "total_steps", "step"]
)
def test_odd_values_are_shown_or_left_out(name, capsys):
    for value in VALUES:
        odd = {**step("rl", 2, 20.0), name: value}
        assert progress_line([step("rl", 1, 10.0), odd]).startswith("rl step ")
        with Display(plain_seconds=0) as display:
            display.update([step("rl", 1, 10.0), odd, {}, {"phase": 3}, step("rl", 3, 30.0)])
        shown = capsys.readouterr()
        assert shown.err == ""
        assert shown.out.splitlines()[-1].startswith("rl step 3/10")


def test_without_a_terminal_lines_are_printed_now_and_then(capsys):
    with Display(plain_seconds=60) as display:
        for number in range(1, 6):
            display.update([step("rl", number, float(number))])
    assert capsys.readouterr().out.splitlines() == ["rl step 1/10", "rl step 5/10 | 5 s left"]


@pytest.mark.heavy
def test_without_a_terminal_the_start_is_a_line_every_few_seconds(capsys):
    """The seconds change it where the phase does not."""
    with Display(plain_seconds=1.1) as display:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            display.update([], "loading the model")
            time.sleep(0.05)
        display.update([step("rl", 1, 1.0)], "rollout")
    *starting, last = capsys.readouterr().out.splitlines()
    assert len(starting) in (2, 3), starting
    assert len(set(starting)) == len(starting)
    assert all(line.startswith("starting: loading the model | ") for line in starting)
    assert last == "rl step 1/10"


def test_on_a_terminal_the_line_is_rewritten_and_validations_stay():
    code = (
        "from rlhpc.observe.progress import Display\n"
        "step = {'phase': 'rl', 'total_steps': 3}\n"
        "with Display() as display:\n"
        "    for number in (1, 2, 3):\n"
        "        check = {'validation/reward_mean': 0.5} if number == 2 else {}\n"
        "        display.update([{**step, 'step': number, 'time': number, **check}])\n"
    )
    master, slave = pty.openpty()
    root = Path(__file__).parents[2]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    subprocess.run([sys.executable, "-c", code], cwd=root, stdout=slave, env=environ, check=True)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "rl step 2/3 | validation 50.0% | 1 s left\r\n" in shown
    assert "\x1b[2K" in shown, "the line is cleared before it is written again"
    last = shown.rsplit("\x1b[2K", 1)[1]
    assert "rl step" not in last, "the live line is gone at the end"


def test_ranks_are_a_line_below_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(plain_seconds=0.0, past=[{"phase": "rl", "step": 3, "total_steps": 9}]) as display:
        display.update([], ranks="update, step 4: ranks 0-1")
    assert capsys.readouterr().out == "rl step 3/9\nupdate, step 4: ranks 0-1\n"


def test_a_narrow_terminal_shows_the_whole_line():
    """In several rows: the running seconds are at its end."""
    code = (
        "from rlhpc.observe.progress import Display\n"
        "values = {'reward/mean': 0.5, 'validation/reward_mean': 0.5, 'perf/tokens_per_second': 12345.0}\n"
        "with Display() as display:\n"
        "    display.update([{'phase': 'rl', 'total_steps': 3, 'step': 1, 'perf/step_seconds': 100.0, **values}])\n"
    )
    master, slave = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, stdout=slave, env=environ, check=True)
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "left | 0 s" in shown


DYING = (
    "import os, signal, sys\n"
    "from rlhpc.observe.progress import Display\n"
    "from rlhpc.core.shown import show\n"
    "with Display(plain_seconds=0) as display:\n"
    "    for number in range(100):\n"
    "        if number == 3:\n"
    "            sys.stdin.readline()  # until nobody reads any more\n"
    "        record = {'phase': 'rl', 'total_steps': 100, 'time': number, 'validation/reward_mean': 0.5}\n"
    "        display.update([{**record, 'step': number}])\n"
    "show('the last line')\n"
    "show('to the end', file=sys.stderr)\n"
)


@pytest.mark.parametrize("kind", ["pipe", "pipe with colours", "terminal"])
def test_a_reader_that_goes_away_ends_nothing(kind):
    """As `rlhpc run | head`, and as a terminal whose ssh session is gone: every write fails from then on."""
    colours = {"FORCE_COLOR": "1"} if "colours" in kind else {}  # rich then takes a pipe for a terminal
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", DYING],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "PYTHONUNBUFFERED": "", **colours},
        text=True,
    )
    os.close(writer)
    shown = b""
    while b"rl step" not in shown:
        shown += os.read(reader, 65536)
    os.close(reader)
    _, errors = process.communicate("gone\n")
    assert process.returncode == 0, errors
    *warnings, last = errors.splitlines()
    assert last == "to the end"
    assert len(warnings) in (1, 2)
    assert all(line.startswith("rlhpc: warning: continuing without ") for line in warnings), errors
