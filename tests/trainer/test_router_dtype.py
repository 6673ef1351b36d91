"""Routers in bfloat16: logits and choices of the trainer beside those of a real engine, by precision of the logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.cases import long_but
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.trainer.test_experts import LATENT

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

SIZES: dict[str, Any] = {"vocab_size": 200, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"num_experts": 128, "num_experts_per_tok": 8},
    "mixtral": {"num_local_experts": 8},
    "dsv3": {**LATENT, "n_routed_experts": 64, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
}


@dataclass(frozen=True)
class Agreement:
    """Of a trainer's first router with the engine's on the same hidden states: shares of logits equal in every bit, and
    of choices that are the same; and the mean difference of log-probs of whole responses."""

    logits: float
    choices: float
    log_probs: float


@pytest.mark.parametrize("kind", long_but(("qwen3moe",), FAMILIES))
def test_routers_agree_with_the_engine_in_its_precision(tmp_path: Path, kind: str) -> None:
    """More often than in float32, which the option asks for."""
    model = make_model(tmp_path / kind, kind, **SIZES, **FAMILIES[kind])
    ((same, wider),) = run_ranks(agreements, 1, model)
    assert same.logits > 0.99
    assert wider.logits < 0.1
    assert same.choices > 0.9999
    assert wider.choices < 0.9999 or kind == "mixtral", "of eight experts no two are near enough"
    assert same.log_probs < 0.1


@dataclass
class _Seen:
    """What the engine's first router took, its logits, and the experts that it chose, by step."""

    inputs: list[Any] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    selected: list[Any] = field(default_factory=list)

    def watch(self, model: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        def keep(gate: Any, given: Any, made: Any) -> None:
            self.inputs.append(given[0].clone())
            self.logits.append(made[0].float().clone())

        next(part for name, part in model.named_modules() if name.endswith(".gate")).register_forward_hook(keep)
        router = next(part for part in model.modules() if isinstance(part, MoERunner)).router
        record = router.capture_fn

        def choose(ids: Any) -> None:
            self.selected.append(ids.clone())
            record(ids)

        router.set_capture_fn(choose)


def agreements(model: Path) -> list[Agreement]:
    """Of ``actor.moe.router_dtype`` engine and float32."""
    from rlhpc.api import Request
    from rlhpc.config.schema import RolloutSection
    from rlhpc.config.training import MoeSection
    from rlhpc.models import read_model
    from rlhpc.reshard.manager import sync_whole_tensors
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine
    from tests.helpers.training import make_actor
    from tests.rollout import engines

    served = ServedModel(model, read_model(model), "bfloat16", 256)
    engine = VllmEngine(served, RolloutSection(kv_cache_gib=0.0625), routed_experts=True)
    sections = [MoeSection(), MoeSection(router_dtype="float32")]
    actors = [make_actor(model, dtype="bfloat16", experts=section) for section in sections]
    sync_whole_tensors(actors[0], engine)
    seen = _Seen()
    engines.vllm_engine(engine).apply_model(seen.watch)
    prompts = [tuple((7 * i + j) % 190 + 5 for j in range(5 + 4 * i)) for i in range(12)]
    completions = engine.generate([Request(p, seed=i, max_tokens=40, temperature=1.0) for i, p in enumerate(prompts)])
    return [_compare(actor, seen, prompts, completions) for actor in actors]


def _compare(actor: Any, seen: _Seen, prompts: Any, completions: Any) -> Agreement:
    import torch

    from rlhpc.backends.megatron.experts import routers_of
    from rlhpc.data.collate import pack_batch, unpack

    router, logits, choices = routers_of(actor.models)[0], [], []
    with torch.no_grad():
        for given, made, selected in zip(seen.inputs, seen.logits, seen.selected, strict=True):
            ours = router.gating(given)
            logits.append((ours == made).flatten())
            own = router.route(ours, torch.zeros(len(ours), 1, dtype=torch.int16)).experts
            choices.append((selected.long()[:, :, None] == own[:, None]).any(-1).flatten())
    pairs = list(zip(prompts, completions, strict=True))
    tokens = [(np.array([*p, *c.tokens]), len(p)) for p, c in pairs]
    (stats,) = actor.log_probs([pack_batch(tokens, sample_ids=range(len(tokens)))], 1.0)
    ours = unpack(pack_batch(tokens, sample_ids=range(len(tokens))), stats.log_probs, [len(p) for p in prompts])
    gaps = np.concatenate([np.abs(x - c.log_probs) for x, (_, c) in zip(ours, pairs, strict=True)])
    return Agreement(*(float(torch.cat(equal).float().mean()) for equal in (logits, choices)), float(gaps.mean()))
