"""Tokens of an engine that guesses have the probabilities that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rlhpc.api import Request
from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_eagle, make_policy
from tests.rollout import engines
from tests.rollout.guesses import drafting, heading

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

PROMPT, SAMPLES = (5, 42), 8_000
ALL = range(engines.VOCAB)


def sampled(path: Path, section: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Three tokens of each sample, the last two of which are guessed, and how many of all guesses were right."""
    engine = engines.ready(path, speculative=section)
    completions = engine.generate([Request(PROMPT, seed, 3, 1.0) for seed in range(SAMPLES)])
    counts = engines.worker(engine).take_guess_counts()
    return np.stack([completion.tokens for completion in completions]), counts["accepted"] / counts["guessed"]


def exact(path: Path) -> list[np.ndarray]:
    """Probabilities of the first, second and third token over the vocabulary."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path).double()

    def following(rows: list[tuple[int, ...]]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor(rows)).logits[:, -1].softmax(-1)

    first = following([PROMPT])[0]
    both = first[:, None] * following([(*PROMPT, one) for one in ALL])
    third = sum(both[one] @ following([(*PROMPT, one, other) for other in ALL]) for one in ALL)
    return [first.numpy(), both.sum(0).numpy(), third.numpy()]


def p_value(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """Of chi-square, with all tokens that are expected less than 5 times as one."""
    counts, expected = np.bincount(tokens, minlength=engines.VOCAB), len(tokens) * probabilities
    rare = expected < 5
    groups = [[*each[~rare], *([each[rare].sum()] if rare.any() else [])] for each in (counts, expected)]
    return float(chisquare(*groups).pvalue)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("head", 0.97, 1.0), ("head of another policy", 0.0, 0.15), ("model", 0.97, 1.0), ("other model", 0.0, 0.15)],
)
def test_tokens_of_right_and_of_wrong_guesses_have_the_policy_s_probabilities(
    tmp_path: Path, kind: str, least: float, most: float
) -> None:
    policies = [make_policy(tmp_path / name, seed, engines.VOCAB) for seed, name in enumerate("ab")]
    embedding = dict(engines.weights(policies[0]))["model.embed_tokens.weight"]
    more = {"embed_tokens.weight": embedding} if kind == "head of another policy" else {}
    guide = policies[0 if "other" in kind else 1]
    section = heading("eagle", make_eagle(tmp_path / "head", guide, **more)) if "head" in kind else drafting(guide)
    tokens, right = run_ranks(sampled, 1, policies[1], section)[0]
    assert least <= right <= most
    for position, probabilities in enumerate(exact(policies[1])):
        assert p_value(tokens[:, position], probabilities) > 0.001
        assert p_value(tokens[:, position], np.roll(probabilities, 1)) < 1e-6, "another distribution is found out"
