"""Mixtures of experts through the whole trainer; the engine's routed experts in training, where the two would part."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhpc.api import Request
from rlhpc.backends.megatron.experts import routers_of
from rlhpc.config.schema import RolloutSection
from rlhpc.data.collate import pack_batch, unpack
from rlhpc.models import read_model
from rlhpc.reshard.manager import sync_whole_tensors
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from tests.helpers.cases import long_but
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import complete, records, write_config
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section
from tests.trainer.fsdp import inputs

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}  # the sizes that vLLM's CPU build knows
# name: (kind, axes of the training side, rollout tp, further keys). Without replay the second parts from its engine.
RUNS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"ep": 2}, 1, {"actor__moe__aux_loss": 0.01}),
    "qwen3moe": (
        "qwen3moe",
        {"ep": 2, "expert_dispatch": "allgather"},
        2,
        {"actor__moe__router_replay": True},
    ),
    "dsv3": ("dsv3", {"tp": 2, "ep": 2}, 1, {"train__minibatches": 2, "actor__moe__bias_update_rate": 0.01}),
}


def make(folder: str, kind: str, **changes: Any) -> None:
    """The demo's inputs with another model; called by the runs' prepare."""
    inputs.make(folder, kind, **changes)
    if kind == "qwen3moe":
        leave_to_rounding(Path(folder) / "model")


def leave_to_rounding(model: Path) -> None:
    """Routers see all four experts alike but for the last bit."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for name, gate in tensors.items():
        if name.endswith("mlp.gate.weight"):
            bits = torch.randint(-1, 2, gate.shape, generator=torch.Generator().manual_seed(0))
            tensors[name] = gate[:1] * (1 + bits * 2.0**-23)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", long_but(("qwen3moe",), ("mixtral", "qwen3moe", "dsv3")))
def test_trainer_and_engine_agree_on_log_probs(tmp_path: Path, name: str) -> None:
    kind, axes, rollout_tp, keys = RUNS[name]
    config = write_config(
        tmp_path,
        prepare={
            "function": "tests.trainer.test_experts:make",
            "arguments": {"folder": str(tmp_path / "inputs"), "kind": kind, **(LATENT if kind == "dsv3" else {})},
        },
        resources__ranks_per_node=2,
        actor__parallel=axes,
        rollout__tp=rollout_tp,
        sft=None,
        train__steps=2,
        actor__optimizer__learning_rate=1e-3,
        rewards__0__function="tests.trainer.test_layouts:sevens",
        data__validation=[],
        **keys,
    )
    complete(config)
    steps = [record for record in records(tmp_path / "run") if "logprob_diff_max" in record]
    assert len(steps) == 2
    for step in steps:
        assert step["logprob_diff_max"] < 1e-4
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0.01


def replay(model: Path) -> dict[str, Any]:
    """Largest gap of log-probs and share of choices that are others than the engine's, without its routed experts and
    with."""
    rank, selected = dist.get_rank(), []
    actor = make_actor(model, optimizer_section(), ep=2)
    for router in routers_of(actor.models):
        router.register_forward_hook(lambda *call: selected.append(call[2].experts))
    served = ServedModel(model, read_model(model), "float32", 256)
    engine = VllmEngine(served, RolloutSection(kv_cache_gib=0.0625), routed_experts=True)
    sync_whole_tensors(actor, engine)
    prompts = [tuple((7 * i + j + 50 * rank) % 190 + 5 for j in range(5 + 4 * i)) for i in range(12)]
    completions = engine.generate([Request(p, seed=i, max_tokens=40, temperature=1.0) for i, p in enumerate(prompts)])
    batch = pack_batch(
        [(np.array([*p, *c.tokens]), len(p)) for p, c in zip(prompts, completions, strict=True)],
        sample_ids=range(len(prompts)),
        routed_experts=[c.routed_experts for c in completions],
    )
    found: dict[str, Any] = {}
    for name, given in (("free", replace(batch, routed_experts=None)), ("replayed", batch)):
        selected.clear()
        (stats,) = actor.log_probs([given], 1.0)
        ours = unpack(batch, stats.log_probs, [len(p) for p in prompts])
        gap = max(float(np.abs(x - c.log_probs).max()) for x, c in zip(ours, completions, strict=True))
        routed_experts = batch.routed_experts.long()
        own = torch.stack(selected, dim=1).sort(-1).values
        other = (own != routed_experts.sort(-1).values - 1).any(-1)[(routed_experts > 0).all(-1).all(-1)]
        found[name] = (gap, float(other.float().mean()))
    return found


def test_routed_experts_of_the_engine_are_taken_where_the_trainer_s_own_differ(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3moe", vocab_size=200)
    leave_to_rounding(model)
    for found in run_ranks(replay, 2, model):
        gap, other = found["free"]
        assert gap > 1e-2
        assert other > 0.1
        gap, other = found["replayed"]
        assert gap < 1e-4
        assert other == 0
