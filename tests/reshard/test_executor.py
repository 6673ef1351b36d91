"""The executor and its checksums on real ranks, with plain tensors in place of models."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhpc.reshard.checksum_plan import plan_checksums
from rlhpc.reshard.executor import Mover
from rlhpc.reshard.sides import SyncSides, plan_weight_sync, sync_sides
from rlhpc.reshard.verify import differing
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard
from tests.helpers.blocks import Parameters, shape_of_kind
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
BUCKET = 1 << 16
# Kind, training axes on four ranks, rollout size, dtype.
MOVES = [
    ("qwen2", {"tp": 2, "pp": 2}, 4, torch.float32),
    ("qwen3", {"tp": 4}, 4, torch.bfloat16),
    ("qwen3moe", {"tp": 2, "ep": 2, "etp": 2}, 4, torch.float32),
    ("dsv3", {"pp": 2, "ep": 2}, 4, torch.bfloat16),
]


def sides_of(kind: str, axes: dict[str, int], tp: int, **ranks: Any) -> SyncSides:
    shape = shape_of_kind(kind, num_hidden_layers=4, vocab_size=200)
    return sync_sides(shape, ParallelLayout(4, **axes), EngineLayout(tp), **ranks)


class Memory(TorchDispatchMode):
    """Bytes of the tensors that are made inside and live at the same time: ``peak``, and the ``largest`` of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._made(tensor)
        return result

    def _made(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(tensor, self._gone, size)

    def _gone(self, size: int) -> None:
        self.live -= size


def move(kind: str, axes: dict[str, int], tp: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a rank found after two moves, and what its check said of weights that were spoilt after that."""
    rank = dist.get_rank()
    sides = sides_of(kind, axes, tp)
    plan = plan_weight_sync(sides, ranks_per_node=2, bucket_bytes=BUCKET, itemsize=dtype.itemsize, rank=rank)
    source, target = Parameters(sides.source[rank], True, dtype), Parameters(sides.target[rank], False, dtype)
    mover = Mover(plan, dtype, CPU)
    with Memory() as memory:
        mover.move(source.view, target.view)
    wrong = target.wrong(dtype)
    mover.move(source.view, target.view)  # again, over what is there
    sums = plan_checksums(sides.source, sides.target, rank)

    def check() -> list[str]:
        return differing(sums, source.view, target.view, mover.wire_dtype, CPU, None)

    found: dict[str, Any] = {
        "wrong": wrong + target.wrong(dtype),
        "buckets": plan.num_buckets,
        "peak": memory.peak,
        "largest tensor": max(shard.box.volume for shard in target.shards) * dtype.itemsize,
        "sound": check(),
    }
    for fault, (on, shard) in faults(target, tp).items():
        with spoilt(target.view(shard), fault) if rank == on else nothing():
            found[fault] = (on, shard.tensor.name, check())
    found["restored"] = check()
    return found


def faults(target: Parameters, tp: int) -> dict[str, tuple[int, Shard]]:
    """The rank that each fault is planted on, and in which shard."""
    found = {"one bit": (3, target.shards[len(target.shards) // 2])}
    keys = [s for s in target.shards if s.tensor.name.endswith("2.self_attn.k_proj.weight")]
    if keys and tp == 4:  # each of two heads on two ranks
        found["stale replica"] = (1, keys[0])
    stacks = [s for s in target.shards if len(s.tensor.shape) == 3]
    if stacks:
        found["swapped"] = (2, stacks[0])
    return found


@contextmanager
def spoilt(block: torch.Tensor, fault: str) -> Iterator[None]:
    before = block.clone()
    last = block[tuple(slice(n - 1, n) for n in block.shape)]
    if fault == "one bit":
        last.copy_((last.view(BITS[last.element_size()]) ^ 1).view(last.dtype))
    elif fault == "stale replica":
        block.mul_(0.99)
    else:
        block[0], block[1] = before[1], before[0]
    yield
    block.copy_(before)


@contextmanager
def nothing() -> Iterator[None]:
    yield


BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module", params=MOVES, ids=lambda move: f"{move[0]}-to-{move[2]}")
def moved(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(move, 4, *request.param)


def test_every_rank_has_its_blocks_of_every_tensor(moved):
    assert [rank["wrong"] for rank in moved] == [[]] * 4


def test_no_more_memory_than_a_bucket_on_each_side(moved):
    assert all(rank["peak"] <= 2 * BUCKET for rank in moved)
    if any(rank["buckets"] for rank in moved):
        assert max(rank["peak"] for rank in moved) > 0
        assert all(rank["buckets"] > 2 for rank in moved)


def test_checksums_agree_when_nothing_is_wrong(moved):
    assert all(rank["sound"] == rank["restored"] == [] for rank in moved)


def test_a_spoilt_weight_is_named_by_its_rank_alone(moved):
    planted = [fault for fault in ("one bit", "stale replica", "swapped") if fault in moved[0]]
    assert len(planted) > 1  # a bit in every model, and a replica or an expert by what the model has
    for fault in planted:
        _is_named(moved, fault)


def _is_named(moved: list[dict[str, Any]], fault: str) -> None:
    on = moved[0][fault][0]
    _, name, reported = moved[on][fault]
    assert reported
    assert all(re.sub(r"\d+", "#", weight).startswith(re.sub(r"\d+|\*", "#", name)) for weight in reported)
    assert [rank[fault][2] for i, rank in enumerate(moved) if i != on] == [[]] * 3
    if fault == "swapped":
        assert [weight.split(".experts.")[1].split(".")[0] for weight in reported] == ["0", "1"]
