"""Weights from a trainer to an engine of another rank while the engine generates, on one GPU or on two."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.api import Request
from rlhpc.config.schema import ReshardSection
from rlhpc.core import env
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.rollout import engines

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": engines.VOCAB}
SECTION = ReshardSection(verify="always", bucket_mib=1)
TOKENS = 200
COMPILED = {env.TORCHDYNAMO_DISABLE: "0"}


@dataclass(frozen=True)
class Seen:
    """What the engine's rank did: answers after the sync, tokens of the requests in flight, its device."""

    after: list[engines.Result]
    tokens: list[int]
    device: int  # the current one, as vLLM has set it
    pinned: bool
    added: int  # bytes of the GPU that the second sync takes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "a", "qwen3", 0, **WIDE), make_model(folder / "b", "qwen3", 1, **WIDE)


def sync(first: Path, second: Path, in_flight: str) -> Seen | None:
    """Version 0 has the weights of one model, version 1 those of another."""
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import job_store
    from rlhpc.reshard.sides import sync_sides
    from rlhpc.reshard.staged.job import StagedJob
    from rlhpc.sharding.engine_shards import EngineLayout
    from rlhpc.sharding.layout import ParallelLayout

    rank = 0 if "trainers" in os.environ[env.RLHPC_ROLE] else 1
    sides = sync_sides(read_model(first), ParallelLayout(1), EngineLayout(1), range(1), range(1, 2))
    device = torch.device("cuda", torch.cuda.current_device())
    job = StagedJob(rank, 2, torch.bfloat16, device, job_store())
    if rank == 0:
        return _train(first, second, sides, job)
    if torch.cuda.device_count() == 1:
        os.environ[env.LOCAL_RANK] = "0"  # both ranks on one GPU, which no job does
    return _generate(first, sides, job, in_flight)


def _train(first: Path, second: Path, sides: Any, job: Any) -> None:
    from rlhpc.reshard.staged.source import WeightSource
    from tests.helpers.training import make_actor

    actor = make_actor(first, dtype="bfloat16")
    source = WeightSource(actor, sides, SECTION, job)
    source.publish(0)
    actor.load_pretrained(second)  # directly after: version 0 is in staging memory
    source.publish(1)
    source.close()


def _generate(path: Path, sides: Any, job: Any, in_flight: str) -> Seen:
    from rlhpc.reshard.staged.target import WeightTarget

    engine = engines.build(path, cuda_graphs=True, kv_cache_gib=1.0)
    target = WeightTarget(sides, SECTION, job)
    engine.wake_weights()
    target.write(engine, 0)
    engine.wake_cache()
    for key in range(8):
        engine.submit(key, Request(tuple(range(5, 30 + key)), seed=key, max_tokens=TOKENS, temperature=1.0))
    ended: dict[int, Any] = {}
    for _ in range(TOKENS // 4):
        ended.update(engine.step())
    target.wait(1)
    ended.update(engine.settle())
    if in_flight == "recompute":
        engine.preempt()
    free = torch.cuda.mem_get_info()[0]
    target.write(engine, 1)  # compares the checksums
    added = free - torch.cuda.mem_get_info()[0]
    while engine.unfinished:
        ended.update(engine.step())
    pinned = all(each._memory.is_pinned() for each in target._free)
    target.close()
    tokens = [len(ended[key].tokens) for key in range(8)]
    return Seen(engines.greedy(engine), tokens, torch.cuda.current_device(), pinned, added)


def stock(path: Path) -> list[engines.Result]:
    engine = engines.ready(path, cuda_graphs=True, kv_cache_gib=1.0)
    return engines.greedy(engine)


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_an_engine_takes_new_weights_between_two_steps(models: tuple[Path, Path], in_flight: str) -> None:
    """Captured CUDA graphs read them where they were captured."""
    _, seen = run_ranks(sync, 2, *models, in_flight, roles=(1, 1), environ=COMPILED)
    assert seen.tokens == [TOKENS] * 8
    assert seen.device == (1 if torch.cuda.device_count() > 1 else 0)
    assert seen.pinned
    assert seen.added < 256 << 20
    (expected,) = run_ranks(stock, 1, models[1], join=False, environ=COMPILED)
    assert [tokens for tokens, _ in seen.after] == [tokens for tokens, _ in expected]
