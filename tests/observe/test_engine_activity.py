"""Idle shares and speed of engines follow from what they report, and are in the attempt's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.records import repeatable
from rlhpc.observe.engine_activity import IDLE, EngineActivity, EngineRow, read_sides
from tools import metric_names


def two_engines() -> EngineActivity:
    activity = EngineActivity(ranks=[4, 6])
    activity.add(0, 6.0, {"weights": 1.0, "tools": 0.5}, 600, 2)
    activity.add(0, 4.0, {"weights": 0.5}, 400, 3)
    activity.add(1, 10.0, {"engines": 5.0}, 250, 3)
    return activity


def test_metrics_are_shares_of_each_engines_time() -> None:
    found = two_engines().metrics()
    assert found["engines/idle_fraction_mean"] == pytest.approx((0.2 + 0.5) / 2)
    assert (found["engines/idle_fraction_max"], found["engines/idle_fraction_max_rank"]) == (0.5, 6.0)
    assert found["engines/tokens_per_second_mean"] == pytest.approx((100 + 25) / 2)
    assert (found["engines/tokens_per_second_min"], found["engines/tokens_per_second_min_rank"]) == (25.0, 6.0)
    assert sum(found[f"engines/idle_{what}_fraction"] for what in IDLE) == pytest.approx(0.35)


def test_every_metric_is_on_the_page() -> None:
    page = metric_names.names(metric_names.PAGE.read_text(encoding="utf-8"))
    assert {name for name in page if name.startswith("engines/")} == set(two_engines().metrics())


def test_a_repeated_step_may_differ_in_them() -> None:
    others = {"trainers/idle_fraction": 0.2, "rollout/queued_groups": 3.0}
    assert repeatable({**two_engines().metrics(), **others, "rollout/completion_tokens": 5.0}) == {
        "rollout/completion_tokens": 5.0
    }


def test_each_step_begins_anew() -> None:
    activity = two_engines()
    activity.metrics()
    assert activity.metrics() == {}
    activity.add(1, 2.0, {}, 4, 5)
    found = activity.metrics()
    assert (found["engines/idle_fraction_mean"], found["engines/tokens_per_second_mean"]) == (0.0, 2.0)


def test_the_file_has_both_sides(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    assert read_sides(attempt) is None
    activity = two_engines()
    activity.metrics()
    activity.write(attempt, 7, {"trainers/idle_fraction": 0.25, "rollout/queued_groups": 3.0})
    found = read_sides(attempt)
    assert found is not None
    assert (found.step, found.trainers_idle, found.queued_groups, found.staleness_max) == (7, 0.25, 3, None)
    assert (found.sent_bytes, found.weights_bytes) == (None, None)
    assert found.engines[1] == EngineRow(engine=1, rank=6, idle=0.5, tokens_per_second=25.0, version=3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1, "engines": [{"x": 1}]}'])
def test_a_file_of_another_form_is_none(tmp_path: Path, text: str) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.engines.write_text(text)
    assert read_sides(attempt) is None
