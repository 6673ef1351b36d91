"""What the engine tests run inside ranks of their own: vLLM changes a process, and pytest's should stay as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.api import Completion, Prompt, Request, RewardResult
from rlhpc.config.schema import RolloutSection
from rlhpc.models import ModelShape, read_model
from rlhpc.rollout.vllm_arguments import DEFAULTS, ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.engine_shards import EngineLayout, engine_shards

FAMILIES = ("llama", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen3moe", "dsv3")
# vLLM's CPU build knows the sizes of the published model alone.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
CHANGES = {"dsv3": _LATENT, "dsv3_direct": {**_LATENT, "rope_interleave": True}}
VOCAB = 200  # not a multiple of vLLM's padding
CONTEXT = 512
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build; tests/gpu has its own")
Result = tuple[list[int], list[float]]  # tokens, log-probs
# Short, long beyond two blocks of the cache, and one token.
PROMPTS = [tuple(range(5, 25)), tuple((7 * i + 3) % 190 + 5 for i in range(300)), (42,)]


class GoodRewards:
    """Finds every response good."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def submit(self, key: int, prompt: Prompt, completion: Completion) -> None:
        self.keys.append(key)

    def results(self) -> dict[int, RewardResult]:
        found, self.keys = {key: RewardResult(1.0) for key in self.keys}, []
        return found


def build(
    path: Path,
    tp: int = 1,
    end_tokens: Sequence[int] = (),
    routed_experts: bool = False,
    shape: ModelShape | None = None,
    reads_text: bool = False,
    **section: Any,
) -> VllmEngine:
    section = {"tp": tp, "kv_cache_gib": 0.0625, "max_num_seqs": 64, **section}
    model = ServedModel(path, shape or read_model(path), DTYPE, CONTEXT, tuple(end_tokens), reads_text=reads_text)
    return VllmEngine(model, RolloutSection(**section), routed_experts=routed_experts)


def ready(path: Path, *args: Any, **options: Any) -> VllmEngine:
    """The same with the weights of ``path``."""
    engine = build(path, *args, **options)
    sync(engine, path)
    return engine


def weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    yield from load_file(path / "model.safetensors").items()


def sync(engine: VllmEngine, path: Path) -> None:
    engine.wake_weights()
    engine.load_weights(weights(path))
    engine.wake_cache()


def write(engine: VllmEngine, path: Path, layout: EngineLayout | None = None) -> None:
    """The same by writing into the engine's own parameters what the plan says."""
    engine.wake_weights()
    fill(engine.open_weights(), path, layout or EngineLayout(1))
    engine.close_weights()
    engine.wake_cache()


def fill(parameters: Mapping[str, Tensor], path: Path, layout: EngineLayout, but: Container[str] = ()) -> None:
    """Write a folder's weights into the engine's open parameters."""
    tensors, tp_rank = dict(weights(path)), dist.get_rank() % layout.tp if layout.tp > 1 else 0
    for shard in engine_shards(read_model(path), layout, tp_rank):
        if shard.local_name in but:
            continue
        name, slices = shard.tensor.name, shard.box.slices
        if "*" in name:  # a layer's experts
            each = [tensors[name.replace("*", str(e))] for e in range(shard.box.start[0], shard.box.stop[0])]
            value = torch.stack([tensor[slices[1:]] for tensor in each])
        else:
            value = tensors[name][slices]
        parameters[shard.local_name][shard.local_box.slices].copy_(value)


def results(completions: Sequence[Completion]) -> list[Result]:
    return [(completion.tokens.tolist(), completion.log_probs.tolist()) for completion in completions]


def greedy(engine: VllmEngine, max_tokens: int = 24) -> list[Result]:
    return results(engine.generate([Request(p, seed=0, max_tokens=max_tokens, temperature=0.0) for p in PROMPTS]))


def stock_greedy(path: Path, tp: int, max_tokens: int = 24) -> list[Result]:
    """The same by vLLM's own front door, from the files in ``path``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.update(DEFAULTS)
    from vllm import LLM, SamplingParams
    from vllm.distributed import destroy_model_parallel

    model_type = json.loads((path / "config.json").read_text())["model_type"]
    options: dict[str, Any] = {}
    if model_type == "deepseek_v3":
        # As in the published config.json; and without the kernel that is wrong in float32.
        options["hf_overrides"] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    llm = LLM(
        str(path),
        **options,
        dtype=DTYPE,
        max_model_len=CONTEXT,
        enforce_eager=DTYPE == "float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=tp,
        worker_cls="tests.rollout.stock_worker.StockWorker" if DTYPE == "float32" else "auto",
        distributed_executor_backend="external_launcher" if tp > 1 else None,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    llm.llm_engine.engine_core._finalizer.detach()  # it would destroy the default process group
    llm.llm_engine.model_executor.shutdown()
    destroy_model_parallel()
    return [
        (
            list(output.outputs[0].token_ids),
            [
                entry[t].logprob
                for entry, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ],
        )
        for output in outputs
    ]


def vllm_engine(engine: VllmEngine) -> Any:
    """vLLM's own engine within ours."""
    return engine._engine


def packed_linears(engine: VllmEngine) -> tuple[int, int]:
    """(linear layers whose weight is packed for the fast kernels, linear layers)."""
    from vllm.model_executor.layers.linear import LinearBase

    def count(model: torch.nn.Module) -> tuple[int, int]:
        linears = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
        return sum(layer.weight.numel() == 0 for layer in linears), len(linears)

    return vllm_engine(engine).apply_model(count)[0]


def worker(engine: VllmEngine) -> Any:
    return vllm_engine(engine).model_executor.driver_worker.worker


@contextmanager
def counted_preemptions() -> Iterator[mock.Mock]:
    """Counts the calls by which vLLM's scheduler preempts a request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request
    with mock.patch.object(Scheduler, preempt.__name__, autospec=True, side_effect=preempt) as calls:
        yield calls


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
