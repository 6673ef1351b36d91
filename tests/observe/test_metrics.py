"""metrics.jsonl has every step once, also after a resume; the clock charges phases."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlhpc.api import RunState
from rlhpc.core.folder import RunFolder
from rlhpc.core.histograms import read_histograms
from rlhpc.core.records import read_records
from rlhpc.observe.metrics import MetricsWriter, Stopwatch


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def write_run(folder: RunFolder, state: RunState, sft_until: int, rl_until: int) -> None:
    """The lines of a run of 3 + 4 steps from ``state`` on, as far as it came."""
    writer = MetricsWriter(folder, state)
    for step in range(state.sft_step + 1, sft_until + 1):
        writer.write("sft", step, 3, {"loss": 1.0 / step})
    if rl_until >= 0 and state.step == 0:
        writer.write("rl", 0, 4, {"validation/reward_mean": 0.3})
    for step in range(state.step + 1, rl_until + 1):
        writer.write("rl", step, 4, {"reward/mean": 0.1 * step})


def steps(folder: RunFolder) -> list[tuple[str, int]]:
    return [(record["phase"], record["step"]) for record in read_records(folder.metrics)]


WHOLE = [("sft", 1), ("sft", 2), ("sft", 3), ("rl", 0), ("rl", 1), ("rl", 2), ("rl", 3), ("rl", 4)]


def test_a_record_names_phase_step_total_and_time(folder: RunFolder):
    writer = MetricsWriter(folder, RunState())
    writer.write("rl", 2, 5, {"reward/mean": 0.5})
    (record,) = read_records(folder.metrics)  # at once: a crash loses nothing
    assert abs(record.pop("time") - time.time()) < 60
    assert record == {"phase": "rl", "step": 2, "total_steps": 5, "reward/mean": 0.5}


@pytest.mark.parametrize(
    ("state", "sft_until", "rl_until"),
    [
        (RunState(), 2, -1),
        (RunState(sft_step=2), 3, -1),
        (RunState(sft_step=3), 3, 2),
        (RunState(sft_step=3, step=2), 3, 4),
        (RunState(sft_step=3, step=4), 3, 4),
    ],
)
def test_after_a_resume_each_step_is_there_once(folder: RunFolder, state: RunState, sft_until: int, rl_until: int):
    write_run(folder, RunState(), sft_until, rl_until)  # ended here; its last checkpoint is ``state``
    write_run(folder, state, 3, 4)
    assert steps(folder) == WHOLE


def test_a_line_cut_short_by_a_crash_is_dropped(folder: RunFolder):
    write_run(folder, RunState(), 3, 1)
    with open(folder.metrics, "a") as file:
        file.write('{"phase": "rl", "st')
    assert len(read_records(folder.metrics)) == 5
    write_run(folder, RunState(sft_step=3, step=1), 3, 4)
    assert steps(folder) == WHOLE


def test_samples_of_steps_taken_again_are_dropped(folder: RunFolder):
    lines = [{"step": step, "prompt": "é\u2028\x85\x0c"} for step in (0, 0, 2, 4)]
    folder.samples.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    MetricsWriter(folder, RunState(sft_step=3, step=2))
    assert read_records(folder.samples) == lines[:3]
    MetricsWriter(folder, RunState(sft_step=3))
    assert read_records(folder.samples) == []


def test_histograms_of_steps_taken_again_are_dropped(folder: RunFolder):
    lines = [{"phase": "rl", "step": step, "time": 1.0, "histograms": {}} for step in (1, 2, 4)]
    folder.histograms.write_text("".join(json.dumps(line) + "\n" for line in lines))
    MetricsWriter(folder, RunState(sft_step=3, step=2))
    assert [step.step for step in read_histograms(folder.histograms)] == [1, 2]


def test_lines_that_are_no_steps_are_dropped_at_a_resume(folder: RunFolder):
    """A crash of a node leaves what it will: half a character, zeros, half a line with another after it."""
    write_run(folder, RunState(), 3, 2)
    odd = b'{"phase": "rl", "st\n\x00\x00\n[1]\n{"phase": "rl"}\n{"phase": null, "step": 1}\n{"step": "x"}\n'
    for file in (folder.metrics, folder.samples):
        with open(file, "ab") as out:
            out.write(odd + b'{"step": 1}\n\xc3')
    write_run(folder, RunState(sft_step=3, step=2), 3, 4)
    assert steps(folder) == WHOLE
    assert read_records(folder.samples) == [{"step": 1}]


def test_the_clock_sums_phases_also_when_they_fail():
    clock, began = Stopwatch(), time.perf_counter()
    for _ in range(2):
        with clock("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), clock("update"):
        raise KeyError
    metrics = clock.metrics()
    assert list(metrics) == ["perf/rollout_seconds", "perf/update_seconds"]
    assert 0.04 <= metrics["perf/rollout_seconds"] <= time.perf_counter() - began
