"""Programs of ranks that serve and train models whose RoPE depends on length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.api import Completion, Request
from rlhpc.checkpoint.export import plan_export, write_export
from rlhpc.config.rollout import RolloutSection
from tests.backends.fsdp.backend_cases import make_backend
from tests.helpers.parts import sharded_model_of
from tests.helpers.tiny_models import make_model
from tests.rollout.any_architecture.serving import describe, make_manager, plain_model
from tests.rollout.engines import VOCAB

ORIGINAL, POSITIONS, TOKENS = 64, 131_072, 160  # of the model, of its table, of a run beyond the original length
HALF = 16  # frequencies of a head of 32 dimensions
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
    "long_factor": [1.5 + 0.5 * i for i in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
Run = tuple[int, int | None]  # tokens of its longest sequence, and at which dynamic RoPE is fixed
Prompt = tuple[int, ...]
Pair = tuple[Prompt, Completion]  # a prompt and its response
PROMPTS: list[Prompt] = [
    tuple(range(5, 25)),
    tuple((7 * i + 3) % 190 + 5 for i in range(100)),
    (42,),
]  # short, long, one token


def make_long(folder: Path, kind: str, positions: int = POSITIONS, **rope: Any) -> Path:
    """A tiny model with LongRoPE; ``rope``: further parameters of it."""
    own = {"original_max_position_embeddings": ORIGINAL} if kind == "phi3" else {}
    rope = {**LONGROPE, **rope}
    if kind == "gemma3":  # by kind of layer
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return make_model(folder, kind, vocab_size=VOCAB, max_position_embeddings=positions, rope_parameters=rope, **own)


def table_distances(folder: Path, runs: Sequence[Run], overrides: bool) -> list[tuple[int, float]]:
    """For each run: positions in vLLM's table, and the trainer's largest difference from it. Without ``overrides``
    vLLM's is that of config.json as it is."""
    found = []
    for run in runs:
        theirs = engine_table(folder, run, overrides)
        found.append((len(theirs), float((trainer_table(folder, run, len(theirs)) - theirs).abs().max())))
    return found


def trainer_table(folder: Path, run: Run, positions: int) -> Tensor:
    """cos and sin side by side [positions, 2 HALF] of the trainer's model."""
    return table_of(sharded_model_of(make_backend(folder, run=run)).module, positions)


def table_of(model: torch.nn.Module, positions: int) -> Tensor:
    """The same of a model of transformers in a pass of so many positions."""
    rotary = next(module for module in model.modules() if hasattr(module, "original_inv_freq"))
    cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
    return torch.cat([cos[0, :, :HALF], sin[0, :, :HALF]], dim=-1)


def engine_table(folder: Path, run: Run, overrides: bool = True) -> Tensor:
    """The same of vLLM's own models, at all positions that they have."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    from rlhpc.rollout.vllm_arguments import engine_arguments

    section = RolloutSection(kv_cache_gib=0.0625)
    arguments = engine_arguments(served(folder, run), section, on_gpu=False, launched=False)
    if not overrides:
        arguments.pop("hf_overrides", None)
    config = EngineArgs(**arguments).create_engine_config()
    text = config.model_config.hf_text_config
    rotary_embedding._ROPE_DICT.clear()  # it knows no lengths: a process has one engine
    with set_current_vllm_config(config):
        rope = rotary_embedding.get_rope(
            2 * HALF, text.max_position_embeddings, rope_parameters=text.rope_parameters, dtype=torch.float32
        )
    if not hasattr(rope, "long_short_cos_sin_cache"):
        return rope.cos_sin_cache
    cache = rope.long_short_cos_sin_cache
    return cache[ORIGINAL:] if rope.use_long_rope else cache[:ORIGINAL]


def served(folder: Path, run: Run) -> Any:
    """The model as the run's engine serves it."""
    from rlhpc.rollout.vllm_arguments import ServedModel

    tokens, rope_tokens = run
    return ServedModel(folder, describe(folder, rope_tokens), "float32", tokens, rope_tokens=rope_tokens)


def serve(
    folder: Path, run: Run, prompts: Sequence[Prompt] = PROMPTS, exported: Path | None = None
) -> dict[str, float]:
    """Largest differences of the trainer's log-probs from those of its engine, and from those of plain transformers
    for the longest sequence and for the first, shorter one alone. ``exported``: a new folder, from which transformers
    reads the model."""
    from rlhpc.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(served(folder, run), RolloutSection(kv_cache_gib=0.0625, max_num_seqs=8))
    actor = make_backend(folder, run=run)
    make_manager(actor, engine).sync()
    requests = [Request(prompt, 7 + i, 40, 1.0) for i, prompt in enumerate(prompts)]
    completions = [engine.generate([request])[0] for request in requests]  # no longer ones beside a short one
    engine.shutdown()
    theirs = [torch.tensor(completion.log_probs) for completion in completions]
    pairs = list(zip(prompts, completions, strict=True))
    _trainer_log_probs(actor, pairs)  # a second pass computes the same
    if exported is not None:
        exported.mkdir()
        plan = plan_export(actor.tensors, folder, "float32", rope_tokens=run[1])
        write_export(plan, exported, actor.full_tensors(), step=0)
    ours, plain = _trainer_log_probs(actor, pairs), _plain_log_probs(plain_model(exported or folder), pairs)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    return {
        "engine": max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        "transformers, long": float((ours[longest] - plain[longest]).abs().max()),
        "transformers, short": float((ours[0] - plain[0]).abs().max()),
    }


def _trainer_log_probs(actor: Any, pairs: Sequence[Pair]) -> list[Tensor]:
    from rlhpc.data.collate import pack_batch

    rows = [(np.array([*p, *c.tokens]), len(p)) for p, c in pairs]
    batch = pack_batch(rows, sample_ids=list(range(len(rows))))
    (stats,) = actor.log_probs([batch], 1.0)
    return list(stats.log_probs[batch.mask.bool()].split([len(completion.tokens) for _, completion in pairs]))


@torch.no_grad()
def _plain_log_probs(model: Any, pairs: Sequence[Pair]) -> list[Tensor]:
    found = []
    for prompt, completion in pairs:
        tokens = torch.tensor([[*prompt, *completion.tokens.tolist()]])
        log_probs = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(log_probs[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0])
    return found
