"""The engine on one GPU: weights from the trainer, memory given back and taken in stages, CUDA graphs kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.api import Request
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_eagle, make_policy
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.test_moved_responses import all_tasks, dealing_of

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

FAMILIES = ("llama", "qwen2", "qwen2_tied", "qwen3")
CACHE_GIB = 2.0
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": engines.VOCAB}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        for seed, letter in enumerate("ab"):
            make_model(folder / family / letter, family, seed, **WIDE)
    return folder


def sync_twice(a: Path, b: Path, options: dict[str, Any] | None = None) -> list[engines.Result]:
    engine = engines.ready(a, **(options or {}))
    first = engines.greedy(engine)
    engine.sleep()
    engines.sync(engine, b)
    second = engines.greedy(engine)
    assert [tokens for tokens, _ in first] != [tokens for tokens, _ in second]
    return second


@pytest.mark.parametrize("family", FAMILIES)
def test_synced_weights_equal_a_fresh_load_from_disk(models: Path, family: str) -> None:
    a, b = models / family / "a", models / family / "b"
    (synced,) = run_ranks(sync_twice, 1, a, b, join=False, environ=COMPILED)
    (stock,) = run_ranks(engines.stock_greedy, 1, b, 1, join=False, environ=COMPILED)
    for (tokens, log_probs), (stock_tokens, stock_log_probs) in zip(synced, stock, strict=True):
        assert tokens == stock_tokens
        np.testing.assert_allclose(log_probs, stock_log_probs, atol=1e-3)


def test_new_weights_reach_a_compiled_model_without_graphs(models: Path) -> None:
    a, b = models / "qwen3" / "a", models / "qwen3" / "b"
    options = ({"cuda_graphs": False, "compile": True}, {"cuda_graphs": False})
    compiled, eager = (run_ranks(sync_twice, 1, a, b, each, join=False, environ=COMPILED)[0] for each in options)
    for (tokens, log_probs), (others, theirs) in zip(compiled, eager, strict=True):
        assert tokens[:8] == others[:8]
        np.testing.assert_allclose(log_probs[:8], theirs[:8], atol=0.05)


def sleep_and_wake(path: Path) -> dict[str, Any]:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    engine = engines.build(path, kv_cache_gib=CACHE_GIB)
    found: dict[str, Any] = {"asleep": free()}
    engine.wake_weights()
    engine.load_weights(engines.weights(path))
    found["weights"] = free()
    engine.wake_cache()
    found["awake"] = free()
    before = engines.greedy(engine)
    for _ in range(3):
        engine.sleep()
        engines.sync(engine, path)
    found["same"] = engines.greedy(engine) == before
    engine.sleep()
    found["asleep again"] = free()
    return found


def test_memory_is_given_back_and_taken_in_stages(models: Path) -> None:
    (found,) = run_ranks(sleep_and_wake, 1, models / "qwen2" / "a", join=False, environ=COMPILED)
    cache = CACHE_GIB * (1 << 30)
    assert found["weights"] - found["awake"] > 0.95 * cache
    assert found["asleep"] - found["awake"] > 0.95 * cache
    assert found["asleep again"] - found["awake"] > 0.9 * cache  # captured graphs and workspaces stay
    assert found["same"]


def seeded(path: Path) -> list[list[engines.Result]]:
    engine = engines.ready(path)
    requests = [Request(engines.PROMPTS[i % 3], seed=2**40 + i, max_tokens=30, temperature=1.0) for i in range(8)]
    return [engines.results(engine.generate(requests)), engines.results(engine.generate(requests[::-1])[::-1])]


def test_a_seed_gives_the_same_tokens_in_another_order(models: Path) -> None:
    """In bfloat16 another batch may round otherwise, so a token here and there may differ, never most of them."""
    ((first, second),) = run_ranks(seeded, 1, models / "qwen2" / "a", join=False, environ=COMPILED)
    assert len({tuple(tokens) for tokens, _ in first}) == len(first)
    same = [a == b for (x, _), (y, _) in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(same) > 0.8


def guess(path: Path, speculative: dict[str, Any] | None) -> dict[str, Any]:
    engine = engines.ready(path, speculative=speculative)
    engine.statistics()
    requests = [
        Request(engines.PROMPTS[i % 2] * 2, seed=2**40 + i, max_tokens=60, temperature=float(i % 4 > 0))
        for i in range(16)
    ]
    return {"results": engines.results(engine.generate(requests)), "runner": engine.choices()["model runner"]} | {
        "statistics": engine.statistics()
    }


def test_guesses_change_no_token(models: Path) -> None:
    """Two engines on V1 runners. In bfloat16 a token here and there may differ, and all that follow it."""
    environ = {**COMPILED, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    always = {"min_match": 1, "min_acceptance": 0.0}
    with_guesses, without = (
        run_ranks(guess, 1, models / "qwen2" / "a", given, join=False, environ=environ)[0] for given in (always, None)
    )
    assert with_guesses["runner"] == "V1"
    assert with_guesses["statistics"]["engine/accepted_length_mean"] > 1
    pairs = list(zip(with_guesses["results"], without["results"], strict=True))
    assert np.mean([x[:8] == y[:8] for (x, _), (y, _) in pairs]) > 0.8
    for (tokens, log_probs), (others, theirs) in pairs:
        same = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if len(set(pair)) > 1), len(tokens))
        assert np.abs(np.array(log_probs[:same]) - theirs[:same]).max(initial=0.0) < 0.1


def test_guesses_of_a_head_change_no_token(tmp_path: Path) -> None:
    """As above, by a head that knows the policy; its products round in bfloat16."""
    policy = make_policy(tmp_path / "policy", 0, engines.VOCAB)
    head = {"method": "eagle", "model": make_eagle(tmp_path / "head", policy), "tokens": 3, "min_acceptance": 0.0}
    environ = {**COMPILED, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with_guesses, without = (
        run_ranks(guess, 1, policy, given, join=False, environ=environ)[0] for given in (head, None)
    )
    assert with_guesses["statistics"]["engine/accepted_length_mean"] > 2
    pairs = zip(with_guesses["results"], without["results"], strict=True)
    assert np.mean([x[:8] == y[:8] for (x, _), (y, _) in pairs]) > 0.8


def resume(path: Path) -> list[list[list[int]]]:
    """Of each request the tokens without an interruption, those before an abort, and those after it."""
    engine = engines.ready(path)
    requests = [Request(engines.PROMPTS[i % 3], seed=2**40 + i, max_tokens=60, temperature=1.0) for i in range(8)]
    whole = engine.generate(requests)
    for key, request in enumerate(requests):
        engine.submit(key, request)
    for _ in range(25):
        engine.step()
    begun = {key: completion.tokens.tolist() for key, completion in engine.abort(range(len(requests))).items()}
    rest = engine.generate(
        [replace(r, prompt=(*r.prompt, *begun[k]), max_tokens=60 - len(begun[k])) for k, r in enumerate(requests)]
    )
    pairs = zip(whole, rest, strict=True)
    return [[w.tokens.tolist(), begun[key], r.tokens.tolist()] for key, (w, r) in enumerate(pairs)]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_resumed_request_continues_its_random_numbers(models: Path, runner: str) -> None:
    """In bfloat16 a token here and there may differ, and all that follow it."""
    environ = {**COMPILED, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    (found,) = run_ranks(resume, 1, models / "qwen2" / "a", join=False, environ=environ)
    assert all(len(begun) > 10 for _, begun, _ in found)
    same = [rest[:5] == whole[len(begun) :][:5] for whole, begun, rest in found if whole[: len(begun)] == begun]
    assert len(same) > 4
    assert np.mean(same) > 0.7


def write_in_place(a: Path, b: Path) -> dict[str, Any]:
    engine = engines.build(a)

    def addresses() -> dict[str, int]:
        engine.wake_weights()
        return {name: tensor.data_ptr() for name, tensor in engine.open_weights().items()}

    found: dict[str, Any] = {"shareable": engine.shareable()}
    before = addresses()
    engines.write(engine, a)
    first = engines.greedy(engine)
    engine.sleep()
    engines.write(engine, b)
    second = engines.greedy(engine)
    engine.sleep()
    found["addresses"] = addresses() == before
    engines.sync(engine, b)
    found["same"] = second == engines.greedy(engine) != first
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_written_in_place_equal_loaded_ones(models: Path, family: str) -> None:
    a, b = models / family / "a", models / family / "b"
    (found,) = run_ranks(write_in_place, 1, a, b, join=False, environ=COMPILED)
    assert found["same"]
    assert found["addresses"]
    assert not found["shareable"]  # captured graphs hold the addresses


def share_everything(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, cuda_graphs=False)
    loaded = engines.greedy(engine)
    engine.sleep()
    engine.wake_weights()
    trainer = {name: torch.zeros_like(own) for name, own in engine.open_weights().items()}
    found: dict[str, Any] = {"all": engine.shareable() == trainer.keys()}
    engines.fill(trainer, path, EngineLayout(1))
    for name, tensor in trainer.items():
        engine.share(name, tensor)
    for _ in range(2):
        engine.sleep()
        engine.wake_weights()
        engine.open_weights()
        engine.close_weights()
        engine.wake_cache()
        found["same"] = engines.greedy(engine) == loaded
    trainer["model.norm.weight"].mul_(2)
    found["live"] = engines.greedy(engine) != loaded
    return found


def test_without_graphs_every_parameter_may_be_the_trainer_s(models: Path) -> None:
    (found,) = run_ranks(share_everything, 1, models / "qwen2" / "a", join=False)
    assert found["all"]
    assert found["same"]
    assert found["live"]


def on_rank(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, max_num_seqs=3)
    return dealing_of(engine, 1, False, ("equal", "turns"))


def test_turns_lose_no_token(tmp_path: Path) -> None:
    """In bfloat16 a token here and there may differ, and all that follow it."""
    make_model(tmp_path / "m", "qwen3", 0, **WIDE)
    (found,) = run_ranks(on_rank, 1, tmp_path / "m", environ=COMPILED)
    assert found["turns"]["put_back"] > 0
    equal, turns = found["equal"]["found"], found["turns"]["found"]
    longest = {(task.group, task.index): task.sampling.max_tokens for task in all_tasks() if task.sampling}
    assert {place: len(sample.log_probs) for place, sample in turns.items()} == longest
    same = [np.mean(turns[place].tokens[:28] == sample.tokens[:28]) for place, sample in equal.items()]
    assert np.mean(same) > 0.8
