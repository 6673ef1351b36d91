"""A run whose engine guesses tokens equals one without guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


def test_a_run_with_guesses_equals_one_without(tmp_path: Path) -> None:
    """Guesses at every token, of which most are wrong; and those of the model before its training."""
    config = write_config(tmp_path, train__steps=2, rollout__max_response_tokens=12, rollout__temperature=2.0)
    second = f"{{method: draft_model, model: {tmp_path / 'inputs' / 'model'}, least_acceptance: 0}}"
    ways = {
        "plain": [],
        "guesses": ["rollout.speculative={shortest_match: 1, least_acceptance: 0}"],
        "second model": [f"rollout.speculative={second}"],
    }
    for name, options in ways.items():
        code, output = run(config, *options, f"run_dir={tmp_path / name}")
        assert code == 0, output
    plain, guesses, drafted = (
        [r for r in records(tmp_path / name) if r["phase"] == "rl" and "reward/mean" in r] for name in ways
    )
    assert len(plain) == 2
    for one, other in zip([*plain, *plain], [*guesses, *drafted], strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert one["rollout/completion_tokens"] == other["rollout/completion_tokens"]
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-5)
        assert other["engine/accepted_length_mean"] >= 1
