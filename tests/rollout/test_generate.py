"""The engine's samples: log-probs, seeds, ends of responses, routed experts, refusals, and sleep between phases."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.api import Completion, Request
from rlhpc.config.load import load_config
from rlhpc.config.rollout import RolloutSection
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.resolved import resolved
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines
from tests.rollout.engines import FAMILIES, PROMPTS, VOCAB, Result

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, engines.cpu_only]


@functools.lru_cache(maxsize=2)
def reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def all_log_probs(path: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> np.ndarray:
    """HuggingFace's log-probs [response, vocabulary] in float32 where each token after the prompt was sampled."""
    with torch.no_grad():
        logits = reference(path)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).numpy()


def log_probs_of(path: Path, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> np.ndarray:
    """Of the tokens themselves, [response]."""
    return all_log_probs(path, prompt, tokens, temperature)[np.arange(len(tokens)), tokens]


def sample(path: Path, temperatures: Sequence[float]) -> dict[float, list[Result]]:
    engine = engines.ready(path)
    found = {
        t: engines.results(
            engine.generate([Request(p, seed=i, max_tokens=40, temperature=t) for i, p in enumerate(PROMPTS)])
        )
        for t in temperatures
    }
    engine.shutdown()
    return found


def sample_families(models: Path) -> dict[str, dict[float, list[Result]]]:
    return {family: sample(models / family / "a", (0.7, 1.0, 0.0)) for family in FAMILIES}


@pytest.fixture(scope="module")
def sampled(models: Path) -> dict[str, dict[float, list[Result]]]:
    return run_ranks(sample_families, 1, models)[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_logits_over_temperature(sampled, models, family, temperature):
    for prompt, (tokens, log_probs) in zip(PROMPTS, sampled[family][temperature], strict=True):
        expected = log_probs_of(models / family / "a", prompt, tokens, temperature)
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)


def test_temperature_zero_takes_the_most_probable_token(sampled, models):
    for prompt, (tokens, log_probs) in zip(PROMPTS, sampled["qwen2"][0.0], strict=True):
        expected = all_log_probs(models / "qwen2" / "a", prompt, tokens, 1.0)
        assert tokens == expected.argmax(-1).tolist()
        np.testing.assert_allclose(log_probs, expected.max(-1), atol=1e-4)


def sample_first_tokens(path: Path, count: int) -> list[int]:
    engine = engines.ready(path)
    requests = [Request(PROMPTS[0], seed=seed, max_tokens=1, temperature=1.0) for seed in range(count)]
    return [completion.tokens[0] for completion in engine.generate(requests)]


def test_seeds_draw_from_the_model_s_distribution(models):
    path, count = models / "qwen2" / "a", 4000
    sampled = np.bincount(run_ranks(sample_first_tokens, 1, path, count)[0], minlength=VOCAB)
    expected = count * np.exp(all_log_probs(path, PROMPTS[0], [0], 1.0)[0])
    kept = expected > 5
    statistic = ((sampled - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert degrees > 10
    assert abs(statistic - degrees) < 5 * np.sqrt(2 * degrees)


def end_and_refuse(path: Path, folder: Path) -> dict[str, Any]:
    engine = engines.build(path)
    found: dict[str, Any] = {"unloaded": refusal(engine)}
    engines.sync(engine, path)
    free = engines.greedy(engine)[0][0]
    engine.sleep()
    found["asleep"] = refusal(engine)
    engine.wake_weights()
    engine.wake_cache()
    found["unloaded again"] = refusal(engine)
    engine.sleep()
    engine.wake_weights()
    engine.load_weights(engines.weights(path))
    found["cache asleep"] = refusal(engine)
    engine.shutdown()
    for file in path.iterdir():  # a folder whose own end token is one that the model says
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**json.loads((path / name).read_text()), "eos_token_id": free[2]}))
    endless = engines.ready(folder)
    found["endless"] = engines.greedy(endless)[0][0]
    endless.shutdown()
    ending = engines.ready(path, end_tokens=[free[5], free[9]])
    (ended,) = ending.generate([Request(PROMPTS[0], seed=0, max_tokens=24, temperature=0.0)])
    (cut,) = ending.generate([Request(PROMPTS[0], seed=0, max_tokens=3, temperature=0.0)])
    return {**found, "free": free, "ended": ended, "cut": cut}


def refusal(engine: engines.VllmEngine) -> str:
    try:
        engines.greedy(engine)
    except AssertionError as error:
        return str(error)
    return ""


def test_ends_and_refusals(models, tmp_path):
    found = run_ranks(end_and_refuse, 1, models / "llama" / "a", tmp_path)[0]
    free = found["free"]
    assert found["endless"] == free
    first_end = min(free.index(free[5]), free.index(free[9]))
    assert found["ended"].tokens.tolist() == free[: first_end + 1]
    assert not found["ended"].truncated
    assert found["cut"].tokens.tolist() == free[:3]
    assert found["cut"].truncated
    assert "sleep" in found["unloaded"]
    assert "sleep" in found["asleep"]
    assert found["unloaded again"] == "request before load_weights()"
    assert "['kv_cache'] sleep" in found["cache asleep"]


def process_state() -> dict[str, Any]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT")
    return {
        "environment": {name: os.environ.get(name) for name in launcher},
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "affinity": os.sched_getaffinity(0),
    }


def build_and_compare(path: Path) -> dict[str, Any]:
    import random

    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = "7"
    del os.environ["LOCAL_RANK"]  # as under a launcher that does not set torchrun's variables

    def numbers() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(1).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    expected = numbers()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    before = process_state()
    engine = engines.build(path)
    same, sampled = process_state() == before, numbers()
    engines.sync(engine, path)
    engines.greedy(engine)
    engine.shutdown()
    torch.set_num_threads(2)
    return {
        "same": same,
        "same random numbers": sampled == expected,
        "threads": torch.get_num_threads(),
        "group": dist.is_initialized() and dist.get_world_size(),
    }


def test_the_process_stays_the_trainer_s(models):
    found = run_ranks(build_and_compare, 1, models / "llama" / "a")[0]
    assert found == {"same": True, "same random numbers": True, "threads": 2, "group": 1}


def wrong_arguments(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A field that this vLLM does not have, and a value that it refuses."""
    given: list[dict[str, Any]] = [{"block_sizes": 32}, {"max_num_batched_tokens": -5}]
    return [(path, {"engine": each}) for each in given]


def build_wrongly(path: Path, *others: Path) -> list[str]:
    found = []
    for folder, section in ((path, {"kv_cache_gib": 1e-5}), *((other, {}) for other in others), *wrong_arguments(path)):
        try:
            engines.build(folder, **section)
        except UserError as error:
            found.append(str(error))
    return found


def test_what_vllm_cannot_do_is_reported_in_a_line(models, tmp_path):
    head_16 = make_model(tmp_path / "heads", "qwen3", head_dim=16, vocab_size=VOCAB)
    latent_48 = make_model(tmp_path / "latent", "dsv3", vocab_size=VOCAB)
    halves = make_model(tmp_path / "halves", "dsv3_direct", vocab_size=VOCAB)
    others = (head_16, latent_48, halves)
    memory, heads, latent, rotated, unknown, refused = run_ranks(build_wrongly, 1, models / "qwen3" / "a", *others)[0]
    unsupported = "config.json: vLLM's CPU build does not support"
    assert heads.startswith(f"{head_16}/{unsupported} attention heads of size 16")
    assert latent.startswith(f"{latent_48}/{unsupported} latent keys (kv_lora_rank + qk_rope_head_dim) of size 48")
    assert rotated.startswith(f"{halves}/config.json: vLLM does not support rope_interleave = False")
    assert memory.startswith("rollout: vLLM rejects the configuration: No available memory")
    assert "rollout.kv_cache_gib" in memory
    assert unknown.startswith("rollout.engine.block_sizes: no field of EngineArgs of the vLLM on this node; did you")
    assert refused.startswith("rollout: vLLM rejects the configuration: ")
    assert "max_num_batched_tokens" in refused


LONG = tuple((11 * i + 5) % 190 + 5 for i in range(300))
# Common prefixes, found in the cache; responses that grow into one more block of it, and of one token.
REQUESTS = [
    *[Request((*LONG, i, *LONG[:20]), seed=i, max_tokens=80, temperature=1.0) for i in range(12)],
    *[Request((7, i), seed=i, max_tokens=1 + i, temperature=1.0) for i in range(8)],
]


def generate(path: Path, tp: int, **section: Any) -> list[Completion]:
    engine = engines.ready(path, tp, routed_experts=True, **section)
    engine.generate(REQUESTS[::3])  # another use of the same cache
    completions = engine.generate(REQUESTS)
    engine.shutdown()
    return completions


def generate_spans_nodes(path: Path) -> list[Completion]:
    """By an engine of two ranks, each on a node of its own; those of one node are in test_weight_sync.py."""
    os.environ[env.LOCAL_RANK] = "0"
    return generate(path, 2)


def generate_all(models: Path) -> dict[str, list[Completion]]:
    """By family; and from a cache so small that requests are put off and begun again."""
    found = {family: generate(models / family / "a", 1) for family in ("mixtral", "qwen3moe", "dsv3")}
    with engines.counted_preemptions() as again:
        found["small cache"] = generate(models / "qwen3moe" / "a", 1, kv_cache_gib=0.0015)
    assert again.call_count
    return found


def own_routed_experts(path: Path, tokens: list[int]) -> np.ndarray:
    """HuggingFace's, [tokens, layers with experts, top_k], sorted."""
    model, routed_experts = reference(path), []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(lambda *call: routed_experts.append(call[2][2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(routed_experts, dim=1).sort(dim=-1).values.numpy()


@pytest.fixture(scope="module")
def routed(models: Path) -> dict[str, list[Completion]]:
    return run_ranks(generate_all, 1, models)[0]


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe", "dsv3", "small cache"])
def test_routed_experts_are_huggingface_s(routed, models, case):
    path = models / ("qwen3moe" if case == "small cache" else case) / "a"
    for request, completion in zip(REQUESTS, routed[case], strict=True):
        tokens = [*request.prompt, *completion.tokens.tolist()]
        expected = own_routed_experts(path, tokens)[:-1]  # the last token was never given to the model
        assert completion.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(completion.routed_experts, axis=-1), expected)


def test_ranks_of_an_engine_agree_on_routed_experts(models, routed):
    both = run_ranks(generate_spans_nodes, 2, models / "qwen3moe" / "a")
    for ours, theirs, alone in zip(*both, routed["qwen3moe"], strict=True):
        np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)
        np.testing.assert_array_equal(np.sort(ours.routed_experts, axis=-1), np.sort(alone.routed_experts, axis=-1))


CACHE_BYTES = 320 << 20


def _caches(engine: engines.VllmEngine) -> list[Any]:
    return engines.worker(engine).model_runner.kv_caches


def sleep_and_wake(path: Path) -> dict[str, Any]:
    engine = engines.ready(path, kv_cache_gib=CACHE_BYTES / (1 << 30))
    before = engines.greedy(engine)
    found = {}
    for cache in _caches(engine):
        cache.fill_(float("nan"))
    found["awake"] = engines.resident_bytes()
    engine.sleep()
    found["asleep"] = engines.resident_bytes()
    engines.sync(engine, path)
    found["same"] = engines.greedy(engine) == before
    found["size"] = sum(cache.untyped_storage().nbytes() for cache in _caches(engine))
    found["used"] = engines.resident_bytes()
    return found


def test_sleep_gives_the_cache_s_memory_back(models):
    found = run_ranks(sleep_and_wake, 1, models / "qwen2" / "a")[0]
    assert found["size"] > 0.95 * CACHE_BYTES
    assert found["awake"] - found["asleep"] > 0.95 * CACHE_BYTES
    assert found["same"]
    assert found["used"] - found["asleep"] < 0.5 * CACHE_BYTES  # only the touched part comes back


def sync_without_sleep(a: Path, b: Path) -> list[engines.Result]:
    engine = engines.ready(a)
    engines.greedy(engine)
    engine.load_weights(engines.weights(b))
    return engines.greedy(engine)


def test_prefixes_of_old_weights_are_not_used(models):
    a, b = models / "qwen2" / "a", models / "qwen2" / "b"
    found = run_ranks(sync_without_sleep, 1, a, b)[0]
    for prompt, (tokens, log_probs) in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(log_probs, log_probs_of(b, prompt, tokens, 1.0), atol=1e-4)


READY = Path(__file__).parents[2] / "configs" / "ready" / "qwen2.5-7b-1node.yaml"
WAITING = 10
TOKENS = 1000  # of a step, by vLLM's own name: more than all requests have


def running_at_once(path: Path, section: RolloutSection) -> tuple[float, float, int]:
    """Returns the most requests that ran and that waited, and vLLM's limit of tokens in a step."""
    number = section.max_num_seqs
    assert number is not None
    engine = engines.ready(path, max_num_seqs=number, kv_cache_gib=section.kv_cache_gib, engine=section.engine)
    engine.generate([Request((5, i % 190 + 5), seed=i, max_tokens=3, temperature=1.0) for i in range(number + WAITING)])
    found = engine.statistics()
    limit = engines.vllm_engine(engine).vllm_config.scheduler_config.max_num_batched_tokens
    return found["engine/running_requests_max"], found["engine/waiting_requests_max"], limit


def test_the_resolved_number_runs_at_once_with_the_configured_arguments(models: Path, tmp_path: Path) -> None:
    path = models / "qwen2" / "a"
    changes = [f"model.path={path}", "slurm.gpus_per_node=0", "planning.gpu=null", "data.validation=[]"]
    changes += ["data.max_prompt_tokens=8", "rollout.max_response_tokens=64", "planning.prompt_tokens=8"]
    changes += ["planning.response_tokens=40", "rollout.kv_cache_gib=0.0625", "train.prompts_per_step=267"]
    changes += [f"rollout.engine.max_num_batched_tokens={TOKENS}"]
    section = resolved(load_config(READY, changes), RunFolder(tmp_path)).rollout
    assert section.max_num_seqs == 34 * 8  # the samples of an eighth of the prompts: the cache holds more
    assert run_ranks(running_at_once, 1, path, section)[0] == (34 * 8, WAITING, TOKENS)
