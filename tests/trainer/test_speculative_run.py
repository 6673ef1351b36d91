"""A run whose engine guesses tokens equals one without guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.heads import make_random_eagle
from tests.helpers.runs import complete, records, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]


@pytest.mark.long
def test_a_run_with_guesses_equals_one_without(tmp_path: Path) -> None:
    """Guesses at every token, of which most are wrong; and those of the model before its training."""
    config = write_config(tmp_path, train__steps=2, rollout__max_response_tokens=12, rollout__temperature=2.0)
    second = f"{{method: draft_model, model: {tmp_path / 'inputs' / 'model'}, min_acceptance: 0}}"
    ways = {
        "plain": [],
        "guesses": ["rollout.speculative={min_match: 1, min_acceptance: 0}"],
        "second model": [f"rollout.speculative={second}"],
    }
    for name, options in ways.items():
        complete(config, *options, f"run_dir={tmp_path / name}")
    plain, guesses, drafted = (rl_records(tmp_path / name) for name in ways)
    assert len(plain) == 2
    assert_equal([*plain, *plain], [*guesses, *drafted])


@pytest.mark.long
def test_a_run_with_a_head_equals_one_without(tmp_path: Path) -> None:
    """A head of random weights on the policy's embedding and LM head, which are trained."""
    config = write_config(tmp_path, train__steps=2, rollout__max_response_tokens=12, rollout__temperature=2.0)
    head = tmp_path / "head"
    section = f"rollout.speculative={{method: eagle, model: {head}, tokens: 2, min_acceptance: 0}}"
    for name, options in {"plain": [], "head": [section]}.items():
        complete(config, *options, f"run_dir={tmp_path / name}")
        if name == "plain":
            make_random_eagle(head, tmp_path / "inputs" / "model")
    plain, guessed = (rl_records(tmp_path / name) for name in ("plain", "head"))
    assert len(plain) == 2
    assert_equal(plain, guessed)


def rl_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["phase"] == "rl" and "reward/mean" in record]


def assert_equal(plain: list[dict[str, Any]], guessed: list[dict[str, Any]]) -> None:
    for one, other in zip(plain, guessed, strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert one["rollout/completion_tokens"] == other["rollout/completion_tokens"]
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-5)
        assert other["engine/accepted_length_mean"] >= 1
