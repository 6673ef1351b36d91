"""The progress line, the duration left, and following a file that grows."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.launch.progress import Display, MetricsFollower, duration, progress_line


def step(phase: str, number: int, time: float, **metrics: float) -> dict:
    return {"phase": phase, "step": number, "total_steps": 10, "time": time, **metrics}


def test_before_the_first_step():
    assert progress_line([]) == "starting"


def test_metrics_of_the_phase_and_the_time_left():
    records = [
        step("sft", 10, 0.0, **{"loss": 2.5}),
        step("rl", 1, 100.0, **{"reward/mean": 0.25, "validation/accuracy": 0.125}),
        step("rl", 3, 120.0, **{"reward/mean": 0.5, "perf/tokens_per_second": 4321.0, "loss": 0.1}),
    ]
    assert progress_line(records[:1]) == "sft step 10/10 | loss 2.500"
    line = "rl step 3/10 | reward 0.500 | validation 12.5% | 4,321 tokens/s | 1 min 10 s left"
    assert progress_line(records) == line


def test_one_step_is_extrapolated_by_its_own_time():
    assert progress_line([step("rl", 4, 0.0, **{"perf/step_seconds": 2.0})]).endswith("12 s left")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_follower_reads_only_whole_new_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1}) + "\n")
    follower = MetricsFollower(file)
    with open(file, "a") as out:
        out.write('{"step": 2}\n{"st')
        out.flush()
        assert follower.read_new() == [{"step": 2}]
        out.write('ep": 3}\n')
    assert follower.read_new() == [{"step": 3}]
    assert follower.read_new() == []


def test_a_file_rewritten_shorter_is_read_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    follower = MetricsFollower(file)
    file.write_text('{"step": 1}\n')
    assert follower.read_new() == [{"step": 1}]


def test_without_a_terminal_lines_are_printed_now_and_then(capsys):
    with Display(plain_seconds=60) as display:
        for number in range(1, 6):
            display.update([step("rl", number, float(number))])
    assert capsys.readouterr().out.splitlines() == ["rl step 1/10", "rl step 5/10 | 5 s left"]


def test_on_a_terminal_the_line_is_rewritten_and_validations_stay():
    code = (
        "from rlhpc.launch.progress import Display\n"
        "step = {'phase': 'rl', 'total_steps': 3}\n"
        "with Display() as display:\n"
        "    for number in (1, 2, 3):\n"
        "        check = {'validation/accuracy': 0.5} if number == 2 else {}\n"
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
