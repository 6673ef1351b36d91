"""Training and engine on one GPU: weights copied inside its memory, and used in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import pushes
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.pushes import Pair
from tests.helpers.tiny_models import make_model
from tests.rollout import engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 256}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, letter in enumerate("ab"):
        make_model(folder / letter, "qwen3", seed, **WIDE)
    return folder


def push_twice(models: Path, **section: Any) -> dict[str, Any]:
    """Answers after each of two pushes with other weights, and the engine's parameters in the trainer's memory."""
    import torch.distributed as dist

    from tests.helpers.training import make_actor

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    pair = Pair(Case("qwen3"), 1)
    engine = engines.build(models / "a", cuda_graphs=not section.get("share_weights", False), kv_cache_gib=1.0)
    actor = make_actor(models / "a", dtype="bfloat16")
    manager = pushes.make_manager(actor, engine, pair, **section)
    with manager:
        answers = [engines.greedy(engine)]
    actor.load_pretrained(models / "b")
    with manager:
        answers.append(engines.greedy(engine))
    return {"answers": answers, "shared": sorted(manager._shared)}


@pytest.mark.parametrize("shared", [False, True])
def test_the_engine_is_the_one_that_read_the_weights_from_disk(models: Path, shared: bool) -> None:
    (found,) = run_ranks(push_twice_shared if shared else push_twice, 1, models, join=False)
    for letter, answers in zip("ab", found["answers"], strict=True):
        (stock,) = run_ranks(engines.stock_greedy, 1, models / letter, 1, join=False)
        for (tokens, log_probs), (stock_tokens, stock_log_probs) in zip(answers, stock, strict=True):
            assert tokens == stock_tokens
            np.testing.assert_allclose(log_probs, stock_log_probs, atol=1e-3)
    assert bool(found["shared"]) == shared


def push_beside_cached_memory(models: Path, method: str) -> bool:
    """A second push while PyTorch holds all memory but half of what the engine's cache takes, half of that in garbage;
    whether the engine answers as after the first."""
    import torch.distributed as dist

    from tests.helpers.training import make_actor

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    engine = engines.build(models / "a", cuda_graphs=False, kv_cache_gib=2.0)
    actor = make_actor(models / "a", dtype="bfloat16")
    manager = pushes.make_manager(actor, engine, Pair(Case("qwen3"), 1), method=method)
    with manager:
        first = engines.greedy(engine)
    size = (torch.cuda.mem_get_info()[0] - (1 << 30)) // 2
    cached, garbage = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    cycle: list[Any] = [garbage]
    cycle.append(cycle)
    del cached, garbage, cycle
    with manager:
        return engines.greedy(engine) == first


@pytest.mark.parametrize("method", ["direct", "gather"])
def test_a_push_takes_memory_that_pytorch_does_not_use(models: Path, method: str) -> None:
    assert run_ranks(push_beside_cached_memory, 1, models, method, join=False) == [True]


def push_twice_shared(models: Path) -> dict[str, Any]:
    return push_twice(models, share_weights=True)
