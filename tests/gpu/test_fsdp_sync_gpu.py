"""Weight sync from FSDP2 to vLLM on one GPU: a known family by its table, others as the engine's loader shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import ReshardSection
from rlhpc.core.rank import RankInfo
from rlhpc.data.collate import pack_batch
from rlhpc.parallel.compat import device
from rlhpc.parallel.groups import join
from rlhpc.reshard.discovered import GroupExchange, discover_sides
from rlhpc.reshard.manager import Job, ReshardManager
from rlhpc.reshard.sides import sync_sides
from rlhpc.rollout.vllm_arguments import ServedModel
from rlhpc.rollout.vllm_engine import VllmEngine
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.mesh_sizes import MeshSizes
from tests.backends.fsdp.backend_cases import Case, make_backend
from tests.helpers.distributed import run_ranks
from tests.helpers.training import TOKENS, batches_of, negative_log_likelihood, optimizer_section
from tests.rollout.any_architecture import serving

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

SYNCS = 2
TOLERANCE = 0.03  # of the mean log-prob difference in bfloat16, as in the acceptance
VISIBLE = 0.05  # of what an update changes: stale weights would show as much


@pytest.mark.parametrize(
    ("kind", "method", "memory"),
    [
        ("qwen3", "direct", {}),
        ("qwen3", "direct", {"cpu_offload": True}),
        ("qwen3", "direct", {"offload": {"parameters": True, "gradients": True, "optimizer": True}}),
        ("phi3", "direct", {}),
        ("granite", "gather", {"cpu_offload": True}),
        ("olmo2", "gather", {}),  # by vLLM's Transformers back end
    ],
)
def test_engine_and_trainer_agree_after_each_sync(
    tmp_path: Path, kind: str, method: str, memory: dict[str, Any]
) -> None:
    """Each sync is verified by checksums. ``direct``: by blocks, without whole tensors."""
    model = serving.make(tmp_path / kind, kind)
    (found,) = run_ranks(_serve, 1, model, kind == "qwen3", method, memory, join=False)
    assert max(found["apart"]) < TOLERANCE
    assert min(found["changed"]) > VISIBLE


def _serve(model: Path, known: bool, method: str, memory: dict[str, Any]) -> dict[str, list[float]]:
    join(RankInfo.from_environ())
    actor = make_backend(model, Case("", memory=memory), optimizer_section(learning_rate=1e-2), dtype="bfloat16")
    engine = _engine(model)
    manager = _manager(actor, engine, known, method)
    found: dict[str, list[float]] = {"apart": [], "changed": []}
    before = None
    for _ in range(SYNCS):
        actor.train(*_update(actor))
        with manager:
            completions = serving.answers(engine)
        theirs = np.concatenate([completion.log_probs for completion in completions])
        found["apart"].append(_apart(_ours(actor, completions), theirs))
        if before is not None:
            found["changed"].append(_apart(_ours(actor, before[0]), before[1]))
        before = completions, theirs
    return found


def _update(actor: Any) -> tuple[Any, ...]:
    return batches_of(actor), negative_log_likelihood, TOKENS, 1.0, 1e-2


def _engine(model: Path) -> Any:
    section = RolloutSection(kv_cache_gib=0.0625, max_num_seqs=8, cuda_graphs=False)
    return VllmEngine(ServedModel(model, serving.describe(model), "bfloat16", 256, (1,)), section)


def _manager(actor: Any, engine: Any, known: bool, method: str) -> Any:
    if known:
        sides = sync_sides(actor.shape, MeshSizes(), EngineLayout(1))
    else:
        sides = discover_sides(actor, engine, GroupExchange())
    section = ReshardSection(verify="always", bucket_mib=1, method=method)
    return ReshardManager(actor, engine, sides, section, Job(1, torch.bfloat16, device()))


def _ours(actor: Any, completions: Any) -> np.ndarray:
    """The trainer's log-probs of the responses' tokens."""
    rows = [(np.array([*p, *c.tokens]), len(p)) for p, c in zip(serving.PROMPTS, completions, strict=True)]
    batch = pack_batch(rows, sample_ids=range(len(rows)))
    (stats,) = actor.log_probs([batch], 1.0)
    return stats.log_probs.float().cpu()[batch.mask.bool()].numpy()


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).mean())
