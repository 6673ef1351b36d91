"""timeline.jsonl: bounded, each step once, malformed lines skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.api import RunState
from rlhpc.core.spans import Span, StepTimeline, read_timelines
from rlhpc.observe import metrics
from rlhpc.observe.metrics import TimelineFile

RANKS = ((Span("rollout", 0.0, 1.25, 0.5), Span("update", 1.25, 2.0, 0.25)), (Span("rollout", 0.01, 1.2, 0.0),))


def write(path: Path, state: RunState, last: int, kept: int = 3) -> None:
    """A warm-up of two steps and RL until ``last``, from ``state`` on."""
    file = TimelineFile(path, state, kept)
    for step in range(state.sft_step + 1, 3):
        file.add(StepTimeline("sft", step, 5.0, RANKS))
    for step in range(state.step + 1, last + 1):
        file.add(StepTimeline("rl", step, 10.0 + step, RANKS))
    file.write()


def steps(path: Path) -> list[tuple[str, int]]:
    return [(found.phase, found.step) for found in read_timelines(path)]


def test_a_line_is_what_the_page_reads(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path, RunState(), 1)
    record = json.loads(path.read_text().splitlines()[-1])
    assert record == {
        "phase": "rl",
        "step": 1,
        "time": 11.0,
        "spans": [[["rollout", 0, 1.25, 0.5], ["update", 1.25, 2, 0.25]], [["rollout", 0.01, 1.2, 0]]],
    }
    assert read_timelines(path)[-1] == StepTimeline("rl", 1, 11.0, RANKS)


def test_the_newest_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.jsonl"
    most = 0
    for last in range(30):
        write(path, RunState(sft_step=2, step=max(0, last - 1)), last)
        most = max(most, len(steps(path)))
    assert steps(path)[-3:] == [("rl", 27), ("rl", 28), ("rl", 29)]
    assert most <= 6
    write(path, RunState(), 300)
    assert len(steps(path)) <= 6
    monkeypatch.setattr(metrics, "_MOST_BYTES", 1000)
    write(path, RunState(), 300, kept=200)
    assert path.stat().st_size <= 1000
    assert steps(path)[-1] == ("rl", 300)


def test_steps_that_are_repeated_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path, RunState(), 3, kept=20)
    write(path, RunState(sft_step=2, step=1), 2, kept=20)
    assert steps(path) == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)], "step 3 was lost"
    write(path, RunState(sft_step=2, step=1), 4, kept=20)
    assert steps(path) == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3), ("rl", 4)]


def test_what_is_no_timeline_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    assert read_timelines(path) == []
    good = StepTimeline("rl", 2, 1.0, RANKS).line()
    bad = [
        "[]",
        "{",
        '{"phase": "rl", "step": 1}',
        '{"phase": "rl", "step": 1, "time": "x", "spans": []}',
        '{"phase": "rl", "step": 1, "time": 1, "spans": [3]}',
        '{"phase": "rl", "step": 1, "time": 1, "spans": [[["a", 1, 2]]]}',
        '{"phase": "rl", "step": 1, "time": 1, "spans": [[["a", 1, 2, "3"]]]}',
        '{"phase": "rl", "step": 1, "time": 1, "spans": [["abcd"]]}',
    ]
    path.write_text("\n".join(bad) + "\n" + good + '{"phase": "rl", "step": 3, "ti')
    assert steps(path) == [("rl", 2)]
