"""An engine that guesses tokens generates the same ones, in fewer steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Completion, Request, SamplingOptions
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.test_sampling_options import add_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]

LENGTH = 96
PROMPTS = [tuple((7 * i * (number + 1)) % 90 + 5 for i in range(6 + 9 * number)) * 2 for number in range(8)]
NAMES = ["greedy", "sampled", "cut", "penalized", "stopped", "bad words", "form", "mixed", "alone", "in parts"]
SHARP = 16.0  # factor of the head's weights: responses of a random model then repeat themselves


def requests(temperature: float, top_p: float = 1.0, **options: Any) -> list[Request]:
    own = SamplingOptions(**options)
    return [Request(prompt, 100 + i, LENGTH, temperature, top_p, own) for i, prompt in enumerate(PROMPTS)]


def sharp(path: Path) -> Any:
    for name, tensor in engines.weights(path):
        yield name, tensor * SHARP if name == "lm_head.weight" else tensor


def sample(path: Path, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Chunks of prompts are shorter than the longest prompts."""
    options = {"engine": {"max_num_batched_tokens": 64}, "sampling": {"top_k": 20}}
    engine = engines.build(path, speculative=speculative, reads_text=True, **options)
    engine.wake_weights()
    engine.load_weights(sharp(path))
    engine.wake_cache()
    found: dict[str, Any] = {}
    for name, asked in (
        ("greedy", requests(0.0)),
        ("sampled", requests(1.0)),
        ("cut", requests(0.8, 0.9, top_k=20)),
        ("penalized", requests(1.0, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=9)),
        ("stopped", requests(1.0, stop_token_ids=tuple(range(5, 25)))),
        ("bad words", requests(1.0, bad_words=("~", "ab"))),
        ("form", requests(1.0, structured_output=("regex", r"(ab[0-9]c){9,}"))),
    ):
        found[name] = engine.generate(asked)
    engine.statistics()
    asked = requests(1.0)
    found["mixed"] = engine.generate([*requests(0.0)[:4], *asked[4:]])
    found["statistics"] = engine.statistics()
    found["alone"] = [engine.generate([request])[0] for request in asked[:3]]
    found["in parts"] = in_parts(engine, asked, 9, 3)
    return found


def in_parts(engine: Any, requests: list[Request], first: int, then: int) -> list[Completion]:
    """Preempted after ``first`` engine steps, and after ``then`` more aborted and resumed."""
    for key, request in enumerate(requests):
        engine.submit(key, request)
    ended = dict(pair for _ in range(first) for pair in engine.step())
    engine.preempt()
    ended |= dict(pair for _ in range(then) for pair in engine.step())
    begun = engine.abort([key for key in range(len(requests)) if key not in ended])
    rest = [
        Request(
            (*requests[k].prompt, *part.tokens.tolist()),
            requests[k].seed,
            requests[k].max_tokens - len(part.tokens),
            1.0,
        )
        for k, part in begun.items()
    ]
    resumed = dict(zip(begun, engine.generate(rest), strict=True))
    return [ended[k] if k in ended else joined(begun[k], resumed[k]) for k in range(len(requests))]


def joined(first: Completion, second: Completion) -> Completion:
    tokens, log_probs = (
        np.concatenate([getattr(one, name) for one in (first, second)]) for name in ("tokens", "log_probs")
    )
    return Completion(tokens, log_probs, second.truncated)


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """With and without guesses."""
    path = tmp_path_factory.mktemp("speculation") / "model"
    shutil.copytree(models / "qwen2" / "a", path)
    add_tokenizer(path)
    return run_ranks(sample, 1, path, {"min_acceptance": 0.0})[0], run_ranks(sample, 1, path, None)[0]


@pytest.mark.parametrize("name", NAMES)
def test_guesses_change_no_token(found, name):
    guessed, plain = found
    for one, other in zip(guessed[name], plain[name], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() < 1e-5


def test_in_parts_and_alone_tokens_are_those_of_a_batch(found):
    guessed, _ = found
    for name in ("alone", "in parts"):
        for one, other in zip(guessed[name], guessed["sampled"], strict=False):
            assert one.tokens.tolist() == other.tokens.tolist()


def test_tokens_that_each_one_was_drawn_from_are_those_without_guesses(found):
    guessed, plain = found
    for one, other in zip(guessed["cut"], plain["cut"], strict=True):
        assert one.kept.counts.tolist() == other.kept.counts.tolist()
        assert one.kept.tokens.tolist() == other.kept.tokens.tolist()
        assert 1 <= one.kept.counts.max() <= 20


def test_steps_yield_several_tokens_each(found):
    statistics = found[0]["statistics"]
    assert statistics["engine/accepted_length_mean"] > 1.5
    assert 0.1 < statistics["engine/guess_acceptance_mean"] <= 1
    assert "engine/accepted_length_mean" not in found[1]["statistics"]


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
