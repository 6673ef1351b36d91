"""What engines and trainers exchange."""

from __future__ import annotations

import json

import pytest

from rlhpc.rollout.generator.messages import Activity, Published, StartPoint, news_key, published_key


def test_a_published_version_goes_through_json() -> None:
    published = Published(3, 2, 24, checkpoint="/run/checkpoints/.writing-0001/step-00000003", validates=True)
    assert Published.from_json(json.loads(json.dumps(published.to_json()))) == published


def test_where_a_run_begins_goes_through_json() -> None:
    start = StartPoint(3, 24, "/run/checkpoints/step-00000003")
    assert StartPoint.from_json(json.loads(json.dumps(start.to_json()))) == start


def test_keys_of_versions_and_engines_differ() -> None:
    assert len({published_key(0), published_key(1), news_key(0), news_key(1)}) == 4


def test_idle_seconds_count_everything_an_engine_waited_for() -> None:
    assert Activity(10.0, {"weights": 2.0, "tools": 0.5}).idle_seconds == pytest.approx(2.5)
