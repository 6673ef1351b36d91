"""Weight sync on one GPU takes the memory that PyTorch holds and does not use. Whether weights arrive, and what sharing
them frees, is shown by the parts of acceptance: test_parts_gpu.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import weight_syncs
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.tiny_models import make_model
from tests.helpers.weight_syncs import Pair
from tests.rollout import engines

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", **WIDE)


def sync_beside_cached_memory(model: Path, method: str) -> bool:
    """A second weight sync while PyTorch holds all memory but half of the engine's cache, half of that in garbage;
    whether the engine answers as after the first."""
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import join
    from tests.helpers.training import make_actor

    join(RankInfo.from_environ())
    engine = engines.build(model, cuda_graphs=False, kv_cache_gib=2.0)
    actor = make_actor(model, dtype="bfloat16")
    manager = weight_syncs.make_manager(actor, engine, Pair(Case("qwen3"), 1), method=method)
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
def test_a_weight_sync_takes_memory_that_pytorch_does_not_use(model: Path, method: str) -> None:
    assert run_ranks(sync_beside_cached_memory, 1, model, method, join=False) == [True]
