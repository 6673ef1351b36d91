"""A weight sync between parts of a rank reads and writes each byte once; blocks for other ranks are packed once too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import equality, weight_syncs
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.tiny_models import make_model
from tests.helpers.weight_syncs import Pair
from tests.rollout import engines
from tests.rollout.engines import CONTEXT, VOCAB, cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]

WIDER = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64}


def moved(folder: Path, pair: Pair) -> dict[str, Any]:
    """Operators and bytes of one unverified weight sync on this rank, by operator, with what the plan says of it."""
    from bench.operators import OperatorCount

    engine = engines.build(folder, pair.rollout_tp)
    equality.keep_groups()
    manager = weight_syncs.make_manager(equality.actor(folder, pair.case), engine, pair, verify="never")
    rank, size = dist.get_rank(), 4  # float32: vLLM's CPU kernels and the back end agree on it in tests
    local, sent, received = (
        sum(copy.box.volume for copy in copies) * size
        for copies in (
            manager.plan.local(rank),
            [copy for bucket in manager.plan.sends(rank) for copy in bucket],
            [copy for bucket in manager.plan.receives(rank) for copy in bucket],
        )
    )
    engine.wake_weights()
    with OperatorCount() as count:
        manager.write()
    return {"calls": count.calls, "bytes": count.bytes, "local": local, "sent": sent, "received": received}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3moe"):
        for name, changes in (("tiny", {}), ("wider", WIDER)):
            make_model(folder / kind / name, kind, 0, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **changes)
    return folder


@pytest.mark.parametrize(("kind", "size"), [("llama", "tiny"), ("qwen3moe", "tiny"), ("qwen3moe", "wider")])
def test_a_rank_by_itself_reads_and_writes_each_byte_once(models: Path, kind: str, size: str) -> None:
    (found,) = run_ranks(moved, 1, models / kind / size, Pair(Case(kind), 1))
    assert found["calls"] == Counter(_foreach_copy_=1, zero_=2)  # padding of embedding and LM head
    assert found["local"] > 0
    assert found["bytes"]["_foreach_copy_"] == 2 * found["local"]


def test_blocks_of_other_ranks_are_packed_and_unpacked_once(models: Path) -> None:
    for found in run_ranks(moved, 2, models / "qwen3moe" / "tiny", Pair(Case("qwen3moe", tp=2, ep=2), 1)):
        copied = found["bytes"]["_foreach_copy_"] + found["bytes"]["copy_"]
        assert min(found["sent"], found["received"]) > 0
        assert copied == 2 * (found["local"] + found["sent"] + found["received"])
        assert found["calls"].keys() <= {"_foreach_copy_", "copy_", "zero_"}, found["calls"]
        assert found["calls"]["zero_"] == 2
