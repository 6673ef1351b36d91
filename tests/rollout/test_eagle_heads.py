"""Guesses of a head on the policy's hidden states change no token, and are right where the head knows the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.api import Completion, Request
from rlhpc.core.errors import UserError
from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_eagle, make_eagle3, make_policy
from tests.rollout import engines
from tests.rollout.guesses import HEAD_PROMPTS, OPTIONS, counted, head_requests, heading, of_policies

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

WAYS = ["greedy", "sampled", "cut", "penalized", "alone", "in parts", "longest"]


def generated(policies: list[Path], section: dict[str, Any]) -> list[dict[str, Any]]:
    """Responses of each of the policies with guesses."""
    return of_policies(engines.build(policies[0], speculative=section, **OPTIONS), policies)


def assert_equal(guessed: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Tokens and log-probs, of each policy in each way, and the tokens that each one was drawn from."""
    for one, other in zip(guessed, plain, strict=True):
        for name in WAYS:
            for mine, theirs in zip(one["completions"][name], other["completions"][name], strict=True):
                assert mine.tokens.tolist() == theirs.tokens.tolist(), name
                assert np.abs(mine.log_probs - theirs.log_probs).max() < 1e-5, name
        for name in ("alone", "in parts"):
            for mine, theirs in zip(one["completions"][name], one["completions"]["sampled"], strict=False):
                assert mine.tokens.tolist() == theirs.tokens.tolist(), name
        for mine, theirs in zip(one["completions"]["cut"], other["completions"]["cut"], strict=True):
            assert mine.kept.counts.tolist() == theirs.kept.counts.tolist()
            assert mine.kept.tokens.tolist() == theirs.kept.tokens.tolist()
        assert one["held"] == 0, "asleep"


@pytest.fixture(scope="module")
def guessed(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    head = make_eagle(tmp_path_factory.mktemp("head") / "eagle", policies[0])
    return run_ranks(generated, 1, policies, heading("eagle", head))[0]


def test_guesses_of_a_head_change_no_token(guessed, plain):
    assert_equal(guessed, plain.policies)


def test_a_head_that_knows_the_policy_guesses_right_by_its_newest_weights(guessed):
    """Its embedding and LM head are the policy's: it knows the second policy, too."""
    for one in guessed:
        for name in ("greedy", "sampled", "cut", "longest"):
            assert one["acceptance"][name] > 0.97, name


def test_log_probs_of_right_guesses_are_those_of_transformers(guessed, policies):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policies[0]).float()
    for request, completion in zip(head_requests(1.0), guessed[0]["completions"]["sampled"], strict=True):
        tokens = torch.tensor([*request.prompt, *completion.tokens.tolist()])
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        own = log_probs[len(request.prompt) - 1 : -1].gather(1, tokens[len(request.prompt) :, None])[:, 0]
        assert np.abs(own.numpy() - completion.log_probs).max() < 1e-5


def test_guesses_of_a_head_that_knows_another_policy_are_wrong(policies: list[Path], tmp_path: Path) -> None:
    """Its own embedding is the first policy's, and stays so; the LM head is the second one's."""
    embedding = dict(engines.weights(policies[0]))["model.embed_tokens.weight"]
    head = make_eagle(tmp_path / "eagle", policies[0], **{"embed_tokens.weight": embedding})
    section, asked = heading("eagle", head), head_requests(1.0)
    (right, counts), (wrong, other) = (run_ranks(counted, 1, policy, section, asked)[0] for policy in policies)
    assert counts["accepted"] > 0.97 * counts["guessed"]
    assert other["accepted"] < 0.15 * other["guessed"]
    assert right != wrong


def test_after_a_pause_a_head_guesses_as_right_as_before(guessed, policies: list[Path], tmp_path: Path) -> None:
    """Its cache has the tokens that were generated in the pause."""
    head = make_eagle(tmp_path / "eagle", policies[0])
    ((rested, after),) = run_ranks(counted, 1, policies[0], heading("eagle", head), head_requests(1.0), 150)
    assert rested == [completion.tokens.tolist() for completion in guessed[0]["completions"]["sampled"]]
    assert 150 <= after["paused"] < 150 + len(HEAD_PROMPTS)
    assert after["accepted"] + after["steps"] == after["generated"] - after["paused"], "no guess in the pause"
    assert after["accepted"] > 0.97 * after["guessed"]


def test_a_head_s_cache_has_what_follows_each_chunk_of_a_prompt(tmp_path: Path) -> None:
    """Its guesses need the position that is the last of the first chunk, two before the prompt's last."""
    policy = make_policy(tmp_path / "policy", 0, engines.VOCAB, distance=2)
    head = make_eagle(tmp_path / "eagle", policy, distance=2)
    counts = run_ranks(after_a_chunk, 1, policy, heading("eagle", head))[0]
    assert counts["guessed"] == counts["accepted"] == 8 * 3


def after_a_chunk(path: Path, section: dict[str, Any]) -> dict[str, int]:
    engine = engines.ready(path, speculative=section, engine={"max_num_batched_tokens": 64})
    for seed in range(8):
        engine.generate([Request(tuple((7 * i + seed) % 190 + 5 for i in range(66)), seed, 5, 1.0)])
    return engines.worker(engine).take_guess_counts()


def test_a_policy_that_gives_a_head_no_hidden_states_is_refused(models: Path, tmp_path: Path) -> None:
    policy = models / "mixtral" / "a"
    head = make_eagle3(tmp_path / "eagle3", policy)
    assert run_ranks(refusal, 1, policy, heading("eagle3", head))[0] == (
        "rollout.speculative.method: vLLM returns no hidden states of this model to a head of eagle3;"
        " use a head of eagle, or another method"
    )


def refusal(path: Path, section: dict[str, Any]) -> str:
    with pytest.raises(UserError) as raised:
        engines.build(path, speculative=section)
    return str(raised.value)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["all tokens", "half of the tokens"])
def test_guesses_of_an_eagle3_head_change_no_token(kind, plain, policies: list[Path], tmp_path: Path) -> None:
    """With the policy's LM head; and with one of its own for half of the vocabulary, which does not follow it."""
    more = {}
    if kind == "half of the tokens":
        rows = torch.arange(0, engines.VOCAB, 2)
        own = dict(engines.weights(policies[0]))["lm_head.weight"][rows]
        more = {"d2t": rows - torch.arange(len(rows)), "lm_head.weight": own}
    head = make_eagle3(tmp_path / "eagle3", policies[0], **more)
    guessed = run_ranks(generated, 1, policies, heading("eagle3", head))[0]
    assert_equal(guessed, plain.policies)
    for one, least in zip(guessed, [0.2, 0.0] if more else [0.97, 0.97], strict=True):
        for name in ("greedy", "sampled", "cut", "longest"):
            assert one["acceptance"][name] >= least, name
            assert not more or one["acceptance"][name] < 0.7, name


@pytest.mark.long
def test_ranks_of_an_engine_guess_alike_by_a_head(policies: list[Path], tmp_path: Path) -> None:
    head = make_eagle3(tmp_path / "eagle3", policies[0])
    found = run_ranks(parallel, 2, policies[0], heading("eagle3", head))
    plain, _ = run_ranks(parallel, 2, policies[0], None)
    for one in found:
        assert one["tokens"] == plain["tokens"]
        assert one["acceptance"] > 0.97


def half_greedy() -> list[Request]:
    return [*head_requests(0.0)[:3], *head_requests(1.0)[3:]]


def parallel(path: Path, section: dict[str, Any] | None) -> dict[str, Any]:
    engine = engines.ready(path, tp=2, speculative=section)
    engine.statistics()
    tokens = [completion.tokens.tolist() for completion in engine.generate(half_greedy())]
    return {"tokens": tokens, "acceptance": engine.statistics().get("engine/guess_acceptance_mean")}


@pytest.mark.long
def test_routed_experts_beside_a_head_are_those_without_one(models: Path, tmp_path: Path) -> None:
    policy = models / "qwen3moe" / "a"
    head = make_eagle3(tmp_path / "eagle3", policy)
    (guessed,), (plain,) = (run_ranks(routed, 1, policy, given) for given in (heading("eagle3", head), None))
    for one, other in zip(guessed, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.routed_experts.shape == other.routed_experts.shape
        assert (one.routed_experts == other.routed_experts).mean() > 0.999  # equal scores may round otherwise


def routed(path: Path, section: dict[str, Any] | None) -> list[Completion]:
    engine = engines.ready(path, speculative=section, routed_experts=True)
    return engine.generate(half_greedy())
