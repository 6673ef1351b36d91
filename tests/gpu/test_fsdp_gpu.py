"""The FSDP2 back end on one and two GPUs: numbers, memory, checkpoints, and weight sync to vLLM."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import utils

from rlhpc.config.rollout import RolloutSection
from rlhpc.config.schema import ReshardSection
from rlhpc.core import env
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
from tests.backends.fsdp.backend_cases import Case, make_backend, make_references
from tests.gpu.memory_levers import (
    CUBLAS_WORKSPACES,
    EVERYTHING,
    LAYERS,
    WIDE,
    check_activations,
    check_offload,
    numbers_and_memory,
    offload_meanwhile,
)
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import STEPS
from tests.helpers.parts import sharded_model_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import TOKENS, batches_of, negative_log_likelihood, optimizer_section, train
from tests.rollout.any_architecture import serving

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

COMPILED = {env.TORCHDYNAMO_DISABLE: "0"}
KINDS = ("llama", "qwen2_tied", "qwen3moe")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
Numbers = list[tuple[float, float]]  # loss and gradient norm of each update


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What plain transformers computes in float32 on the CPU."""
    return run_ranks(make_references, 1, tmp_path_factory.mktemp("references"), KINDS)[0]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wide") / "model", "qwen3", **WIDE)


def near(ours: Numbers, theirs: Numbers, loss: float, norm: float) -> bool:
    """Whether losses and norms agree up to these relative differences."""
    first, second = zip(*ours, strict=True), zip(*theirs, strict=True)
    return all(a == pytest.approx(b, rel=rel) for a, b, rel in zip(first, second, (loss, norm), strict=True))


def run(folder: Path, case: Case, dtype: str, steps: int = STEPS, optimizer: dict[str, Any] | None = None) -> Numbers:
    """Numbers of a back end's updates on this rank's GPU."""
    _join()
    return train(make_backend(folder, case, optimizer_section(**(optimizer or {})), dtype=dtype), steps)


def _join() -> None:
    join(RankInfo.from_environ())


@pytest.mark.parametrize(("dtype", "loss", "norm"), [("float32", 1e-4, 1e-4), ("bfloat16", 1e-2, 5e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_transformers_on_a_cpu(
    references: dict[str, Path], kind: str, dtype: str, loss: float, norm: float
) -> None:
    expected = torch.load(references[kind] / "results.pt")["numbers"]
    (found,) = run_ranks(run, 1, references[kind] / "start", Case(kind), dtype, join=False)
    assert near(found, expected, loss, norm)


@TWO
@pytest.mark.parametrize(
    "case",
    [Case("llama"), Case("llama", dp_replicate=2), Case("llama", cp=2), Case("llama", cp=2, cp_method="all_gather")],
)
def test_two_gpus_train_as_one_process(references: dict[str, Path], case: Case) -> None:
    expected = torch.load(references["llama"] / "results.pt")["numbers"]
    for found in run_ranks(run, 2, references["llama"] / "start", case, "float32", join=False):
        assert near(found, expected, 1e-4, 1e-4)


def test_memory_levers_free_the_gpu_and_change_no_number(wide: Path, tmp_path: Path) -> None:
    """Offload between phases, with a checkpoint that is written meanwhile; and state that is always in CPU memory."""
    (found,) = run_ranks(_levers, 1, wide, tmp_path / "saved", join=False)
    check_offload(found)
    assert near(found["in CPU memory"], found["plain"], 1e-3, 1e-3), "AdamW of a CPU rounds differently"
    assert found["pinned"]
    assert found["same tensors"], "FSDP has replaced what optimizer and weight sync hold"
    assert found["on the GPU"] - CUBLAS_WORKSPACES < 0.02 * found["held"]
    assert found["peak"] < 0.7 * found["plain peak"]


def _levers(path: Path, saved: Path) -> dict[str, Any]:
    _join()
    found: dict[str, Any] = {}
    found["plain"], found["plain peak"] = _trained(path, {})[:2]
    gc.collect()  # FSDP's modules are in cycles
    actor = make_backend(path, Case("", memory={"offload": EVERYTHING}), optimizer_section(), dtype="bfloat16")
    found |= offload_meanwhile(actor, saved)
    del actor
    gc.collect()
    found["in CPU memory"], found["peak"], actor = _trained(path, {"cpu_offload": True})
    model = sharded_model_of(actor)
    tensors = model.local_tensors().values()
    found["pinned"] = all(tensor.is_pinned() for tensor in tensors)
    found["on the GPU"] = torch.cuda.memory_allocated()
    addresses = [tensor.data_ptr() for tensor in tensors]
    train(actor)
    found["same tensors"] = addresses == [tensor.data_ptr() for tensor in model.local_tensors().values()]
    return found


def _trained(model: Path, memory: dict[str, Any]) -> tuple[Numbers, int, Any]:
    """Numbers of four updates, their peak memory, and the back end."""
    actor = make_backend(model, Case("", memory=memory), optimizer_section(), dtype="bfloat16")
    torch.cuda.reset_peak_memory_stats()
    return train(actor, 4), torch.cuda.max_memory_allocated() - CUBLAS_WORKSPACES, actor


def test_activations_in_cpu_memory_free_the_gpu_and_change_no_number(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", **WIDE, num_hidden_layers=LAYERS)
    (found,) = run_ranks(_activations, 1, model, join=False)
    check_activations(*found)


def _activations(model: Path) -> list[dict[str, Any]]:
    """Without and with offload."""
    _join()
    found = []
    for offload in (False, True):
        memory, before = {"recompute": "full", "offload_activations": offload}, torch.cuda.memory_allocated()
        actor = make_backend(model, Case("", memory=memory), optimizer_section(), dtype="bfloat16")
        found.append(numbers_and_memory(actor, before))
        found[-1]["most"] = sharded_model_of(actor).activations.most if offload else 0
        del actor
        gc.collect()  # FSDP's modules are in cycles
    return found


@pytest.mark.parametrize("name", ["adamw8bit", "muon"])
def test_other_optimizers_learn_and_resume_bit_equal(wide: Path, tmp_path: Path, name: str) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    ((losses, after, resumed),) = run_ranks(_resume, 1, wide, tmp_path / "saved", name, join=False, environ=COMPILED)
    assert losses[-1] < 0.8 * losses[0]
    assert after == resumed


def _resume(model: Path, saved: Path, name: str) -> tuple[list[float], Numbers, Numbers]:
    _join()
    actor = make_backend(model, Case(""), optimizer_section(name=name), dtype="bfloat16")
    losses = [loss for loss, _ in train(actor, 8)]
    saved.mkdir()
    actor.save(saved)
    after = train(actor, 2)
    actor.load(saved)
    return losses, after, train(actor, 2)


@pytest.mark.parametrize("memory", [{}, {"recompute": "full"}])
def test_compiled_layers_are_one_graph_without_breaks(wide: Path, memory: dict[str, Any]) -> None:
    (plain,) = run_ranks(run, 1, wide, Case("", memory=memory), "bfloat16", join=False)
    ((found, breaks),) = run_ranks(_compiled, 1, wide, memory, join=False, environ=COMPILED, fresh=True)
    assert near(found, plain, 1e-2, 5e-2)
    assert breaks == 0


def _compiled(model: Path, memory: dict[str, Any]) -> tuple[Numbers, int]:
    found = run(model, Case("", memory=memory, compiled=True), "bfloat16")
    assert utils.get_compilation_metrics(), "nothing was compiled"
    return found, sum(utils.counters["graph_break"].values())


def test_a_reward_model_s_values_are_near_to_float32(wide: Path) -> None:
    ((ours, exact),) = run_ranks(_values, 1, wide, join=False)
    assert float((ours - exact).abs().mean()) < 0.03 * float(exact.abs().mean())


def _values(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    _join()
    found = []
    for dtype in ("bfloat16", "float32"):
        critic = make_backend(model, dtype=dtype, head="value")
        generator = torch.Generator().manual_seed(1)
        head = sharded_model_of(critic).local_tensors()["score.weight"]
        head.copy_(torch.randn(head.shape, generator=generator) / head.size(1) ** 0.5)
        (values, *_) = critic.values(batches_of(critic))
        found.append(values.values.float().cpu())
    return found[0], found[1]


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
        actor.train(batches_of(actor), negative_log_likelihood, TOKENS, 1.0, 1e-2)
        with manager:
            completions = serving.answers(engine)
        theirs = np.concatenate([completion.log_probs for completion in completions])
        found["apart"].append(_apart(_ours(actor, completions), theirs))
        if before is not None:
            found["changed"].append(_apart(_ours(actor, before[0]), before[1]))
        before = completions, theirs
    return found


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
