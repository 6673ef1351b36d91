"""A second model's guesses change no token, and are right where both models draw the same one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rlhpc.api import Request, SamplingOptions
from tests.helpers.distributed import run_ranks
from tests.rollout import engines
from tests.rollout.engines import CONTEXT
from tests.rollout.guesses import NAMES, PROMPTS, counted, drafting, held, sharp, with_guesses

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


@pytest.fixture(scope="module", params=["same", pytest.param("other", marks=pytest.mark.long)])
def draft(request: pytest.FixtureRequest) -> str:
    """Name of the guessing model: a copy of what the policy is synced to, or another one."""
    return request.param


@pytest.fixture(scope="module")
def guessed(draft: str, policy: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = models / "llama" / "b"
    if draft == "same":
        model = tmp_path_factory.mktemp("drafts") / draft
        shutil.copytree(models / "qwen2" / "a", model)
        save_file(dict(sharp(policy)), model / "model.safetensors")
    return run_ranks(with_guesses, 1, policy, drafting(model))[0]


@pytest.mark.parametrize("name", NAMES)
def test_guesses_of_a_second_model_change_no_token(guessed, plain, name):
    for one, other in zip(guessed[name], plain.sharp[name], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_guesses_are_right_only_where_both_models_draw_the_same_token(draft, guessed):
    statistics = guessed["statistics"]
    if draft == "same":
        assert statistics["engine/guess_acceptance_mean"] > 0.99
        assert statistics["engine/accepted_length_mean"] > 3.9
    else:
        assert statistics["engine/guess_acceptance_mean"] < 0.1


def asked(temperature: float, length: int = 48, **options: Any) -> list[Request]:
    """Requests whose sampled tokens are far from greedy: the models' heads are not sharpened."""
    return [Request(prompt, 7 + i, length, temperature, **options) for i, prompt in enumerate(PROMPTS)]


def steps(policies: list[Path], section: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What an engine generates with each of the policies, asleep before each sync."""
    engine, found = engines.build(policies[0], speculative=section), []
    for policy in policies:
        engines.sync(engine, policy)
        ways = {
            "greedy": asked(0.0),
            "sampled": asked(1.0),
            "cut": asked(0.8, top_p=0.7, options=SamplingOptions(top_k=20)),
            "longest": [*asked(1.0), *(Request((5,) * size, 1, CONTEXT - size, 1.0) for size in (505, 490, 475))],
        }
        engine.statistics()
        tokens, acceptance = {}, {}
        for name, requests in ways.items():
            tokens[name] = [completion.tokens.tolist() for completion in engine.generate(requests)]
            acceptance[name] = engine.statistics().get("engine/guess_acceptance_mean")
        engine.sleep()
        found.append({"tokens": tokens, "acceptance": acceptance, "held": held(engine)})
    return found


def test_guesses_survive_sleep_and_new_weights_of_the_policy(models: Path) -> None:
    """The second model stays what its folder has: right again once the policy has those weights again."""
    first, second = (models / "qwen3" / letter for letter in "ab")
    policies = [first, second, first]
    (plain,) = run_ranks(steps, 1, policies, None)
    (guessed,) = run_ranks(steps, 1, policies, drafting(first))
    for one, other, policy in zip(guessed, plain, policies, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["held"] == 0, "asleep"
        for name, share in one["acceptance"].items():
            assert share > 0.97 if policy == first else share < 0.5, name


def test_after_a_pause_guesses_are_as_right_as_before(models: Path) -> None:
    """The second model's cache has the tokens that were generated in the pause."""
    path = models / "qwen2" / "a"
    section, requests = drafting(path), asked(1.0)
    (always, counts), (rested, after) = (run_ranks(counted, 1, path, section, requests, rest)[0] for rest in (0, 150))
    assert always == rested
    assert counts["paused"] == 0
    assert 150 <= after["paused"] < 150 + len(PROMPTS)
    assert after["accepted"] + after["steps"] == after["generated"] - after["paused"], "no guess in the pause"
    assert after["accepted"] > 0.97 * after["guessed"]


def test_wrong_guesses_of_a_second_model_pause_and_go_on(models: Path) -> None:
    path, other = models / "qwen2" / "a", models / "llama" / "b"
    section, requests, terms = drafting(other, min_acceptance=0.25), asked(1.0), {"window": 60, "pause": 100}
    (guessed, counts), (plain, _) = (
        run_ranks(counted, 1, path, given, requests, 0, terms)[0] for given in (section, None)
    )
    assert guessed == plain
    assert counts["paused"] > 100 + len(PROMPTS), "and a second time"
    assert counts["guessed"] >= 120, "two windows"


def test_a_response_may_end_after_the_guesses_that_reach_min_tokens(models: Path) -> None:
    """A quarter of all tokens end one. The first three guesses reach it."""
    path = models / "qwen2" / "a"
    (guessed,), (plain,) = (run_ranks(stopped, 1, path, given) for given in (drafting(path), None))
    assert guessed == plain
    assert any(len(tokens) == 5 for tokens in plain), "it ends at once"


def stopped(path: Path, section: dict[str, Any] | None) -> list[list[int]]:
    engine = engines.ready(path, speculative=section)
    own = SamplingOptions(min_tokens=4, stop_token_ids=tuple(range(0, engines.VOCAB, 4)))
    requests = [Request(prompt, seed, 8, 1.0, options=own) for seed in range(8) for prompt in PROMPTS]
    return [completion.tokens.tolist() for completion in engine.generate(requests)]


@pytest.mark.long
def test_ranks_of_an_engine_draft_alike(models: Path) -> None:
    path = models / "llama" / "a"
    first, second = run_ranks(tensor_parallel, 2, path, drafting(path))
    plain, _ = run_ranks(tensor_parallel, 2, path, None)
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert min(first["acceptance"].values()) > 0.97


def tensor_parallel(path: Path, section: dict[str, Any] | None) -> dict[str, Any]:
    engine = engines.ready(path, tp=2, speculative=section)
    engine.statistics()
    found: dict[str, Any] = {"tokens": {}, "acceptance": {}}
    for name, requests in (("greedy", asked(0.0)), ("sampled", asked(1.0))):
        found["tokens"][name] = [completion.tokens.tolist() for completion in engine.generate(requests)]
        found["acceptance"][name] = engine.statistics().get("engine/guess_acceptance_mean")
    return found
