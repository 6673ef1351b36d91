"""A run whose engine guesses tokens equals one without guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.runs import records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def test_a_run_with_guesses_equals_one_without(tmp_path: Path) -> None:
    """Guesses at every token, of which most are wrong."""
    config = write_config(tmp_path, train__steps=2, rollout__max_response_tokens=12)
    found = []
    for name, options in (("plain", []), ("guesses", ["rollout.speculative={shortest_match: 1}"])):
        code, output = run(config, *options, f"run_dir={tmp_path / name}")
        assert code == 0, output
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        found.append([json.loads(line)["response"] for line in lines])
    assert found[0] == found[1]
    assert len(found[0]) == 16
    plain, guesses = (
        [r for r in records(tmp_path / name) if r["phase"] == "rl" and "reward/mean" in r]
        for name in ("plain", "guesses")
    )
    assert len(plain) == 2
    for one, other in zip(plain, guesses, strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert other["engine/accepted_length_mean"] >= 1
