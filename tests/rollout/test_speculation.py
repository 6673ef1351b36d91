"""An engine that guesses tokens generates the same ones, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Completion
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.guesses import NAMES, requests, sharp, with_guesses

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


@pytest.fixture(scope="module")
def guessed(policy: Path) -> dict[str, Any]:
    return run_ranks(with_guesses, 1, policy, {"min_acceptance": 0.0})[0]


@pytest.mark.parametrize("name", NAMES)
def test_guesses_change_no_token(guessed, plain, name):
    for one, other in zip(guessed[name], plain.sharp[name], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() < 1e-5


def test_in_parts_and_alone_tokens_are_those_of_a_batch(guessed):
    for name in ("alone", "in parts"):
        for one, other in zip(guessed[name], guessed["sampled"], strict=False):
            assert one.tokens.tolist() == other.tokens.tolist()


def test_tokens_that_each_one_was_drawn_from_are_those_without_guesses(guessed, plain):
    for one, other in zip(guessed["cut"], plain.sharp["cut"], strict=True):
        assert one.kept.counts.tolist() == other.kept.counts.tolist()
        assert one.kept.tokens.tolist() == other.kept.tokens.tolist()
        assert 1 <= one.kept.counts.max() <= 20


def test_steps_yield_several_tokens_each(guessed, plain):
    statistics = guessed["statistics"]
    assert statistics["engine/accepted_length_mean"] > 1.5
    assert 0.1 < statistics["engine/guess_acceptance_mean"] <= 1
    assert "engine/accepted_length_mean" not in plain.sharp["statistics"]


def sample_briefly(path: Path, options: dict[str, Any]) -> list[Completion]:
    engine = engines.build(path, **options)
    engine.wake_weights()
    engine.load_weights(sharp(path))
    engine.wake_cache()
    return engine.generate([*requests(0.0)[:4], *requests(1.0)[4:]])


@pytest.mark.long
def test_ranks_of_an_engine_verify_alike(models: Path) -> None:
    path, always = models / "llama" / "a", {"min_acceptance": 0.0}
    first, second = run_ranks(sample_briefly, 2, path, {"tp": 2, "speculative": always})
    plain = run_ranks(sample_briefly, 2, path, {"tp": 2})[0]
    for one, other, expected in zip(first, second, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.long
def test_experts_of_right_guesses_are_those_without_guesses(models: Path) -> None:
    path, options = models / "qwen3moe" / "a", {"routed_experts": True}
    (guessed,) = run_ranks(sample_briefly, 1, path, {**options, "speculative": {"min_acceptance": 0.0}})
    (plain,) = run_ranks(sample_briefly, 1, path, options)
    for one, other in zip(guessed, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.routed_experts.shape == other.routed_experts.shape
        assert (one.routed_experts == other.routed_experts).mean() > 0.999  # equal scores may round otherwise
