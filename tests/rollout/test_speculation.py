"""An engine that guesses tokens, by words or layers of the policy: the same tokens and probabilities, fewer steps."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rlhpc.api import Completion, Request
from rlhpc.checkpoint.formats.described import describe_model
from rlhpc.config.schema import RolloutSection
from rlhpc.plan.estimates.engine_weights import draft_kv_elements, draft_weights
from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_eagle, make_mtp, make_policy
from tests.rollout import engines
from tests.rollout.guesses import NAMES, drafting, head_requests, heading, in_parts, requests, sharp, with_guesses

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
    """The p-value of chi-square, with all tokens that are expected less than 5 times as one."""
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


def generated(policies: list[Path], section: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Responses of each of the policies, asleep before each sync."""
    shape = describe_model(policies[0])
    engine = engines.build(policies[0], speculative=section, shape=shape)
    found = []
    for policy in policies:
        engines.sync(engine, policy)
        engine.statistics()
        sampled, cut = head_requests(1.0)[1:], head_requests(0.8, 0.9, top_k=20)[1:3]
        completions = engine.generate([*head_requests(0.0)[1:4], *sampled, *cut])
        acceptance = engine.statistics().get("engine/guess_acceptance_mean")
        completions += in_parts(engine, sampled, 7, 4)
        engine.sleep()
        found.append({"tokens": [one.tokens.tolist() for one in completions], "acceptance": acceptance})
    model = getattr(getattr(engines.worker(engine).model_runner, "drafter", None), "model", None)
    if model is not None:
        found[0]["own"] = sum(map(prod, model.packed_weights.shapes.values()))
    return found


def compare(folder: Path, kind: str) -> None:
    changes = {"vocab_size": engines.VOCAB, "max_position_embeddings": engines.CONTEXT, **engines.CHANGES.get(kind, {})}
    policies = [make_mtp(folder / name, kind, seed, **changes) for seed, name in enumerate("ab")]
    (plain,), (guessed,) = (run_ranks(generated, 1, policies, given) for given in (None, heading("mtp", None)))
    for one, other in zip(guessed, plain, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["acceptance"] > 0.97, "the embedding and LM head are the newest policy's"
    section = RolloutSection(speculative={"method": "mtp"})
    predicted = draft_weights(section, describe_model(policies[0]), "float32")
    assert predicted == 4 * guessed[0]["own"]


@pytest.mark.long
def test_deepseek_s_layer_guesses_and_changes_no_token(tmp_path: Path) -> None:
    compare(tmp_path, "dsv3")


def test_glm_s_layer_guesses_and_changes_no_token(tmp_path: Path) -> None:
    compare(tmp_path, "glm4_moe")


def test_keys_and_values_of_a_layer_that_guesses_are_one_layer_s(tmp_path: Path) -> None:
    make_mtp(tmp_path / "dsv3", "dsv3", 0)
    shape = describe_model(tmp_path / "dsv3")
    assert draft_kv_elements(RolloutSection(speculative={"method": "mtp"}), shape) == 32 + 16
