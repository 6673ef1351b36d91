"""Executes weight-sync plans on arrays of numbers, and makes random layouts for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from random import Random

import numpy as np

from rlhpc.models import ModelShape, shape_of
from rlhpc.reshard.plan import Copy, ReshardPlan, Side
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, Shard, TensorSpec
from tests.helpers.coverage import STAGES

_BASE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
_DEEPSEEK = {
    **_EXPERTS,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 2,
}
SHAPES: dict[str, ModelShape] = {
    kind: shape_of({**_BASE, **changes})
    for kind, changes in {
        "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8},
        "qwen2": {},
        "qwen2_tied": {"tie_word_embeddings": True},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 4, "num_key_value_heads": 1},
        "qwen3_moe": {**_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [2]},
        "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v3_direct": {**_DEEPSEEK, "q_lora_rank": None},
    }.items()
}


def random_layout(shape: ModelShape, rng: Random) -> ParallelLayout:
    """A layout of up to 16 ranks that Megatron supports for the shape: any axis, uneven and virtual stages."""
    while True:
        tp, cp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
        stages = rng.choice([*STAGES, {"pp": 4}])
        ep, etp = (rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 4))) if shape.experts else (1, 1)
        ranks = tp * cp * dp
        if ranks * stages.get("pp", 1) <= 16 and ranks % (ep * etp) == 0:
            layout = ParallelLayout(ranks * stages.get("pp", 1), tp=tp, cp=cp, ep=ep, etp=etp, **stages)
            layout.stage_layers(shape.num_layers)
            return layout


def random_cuts(rng: Random) -> tuple[Side, Side]:
    """Arbitrary sides: boxes of the source overlap, those of the target are random, each in its own parameters."""
    tensors = [
        TensorSpec(f"t{i}", tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3))), float32=rng.random() < 0.3)
        for i in range(rng.randint(1, 3))
    ]
    ranks = rng.randint(1, 6)
    first_target = rng.choice((0, 0, ranks))
    source: dict[int, list[Shard]] = defaultdict(list)
    target: dict[int, list[Shard]] = defaultdict(list)
    for tensor in tensors:
        whole = Box((0,) * len(tensor.shape), tensor.shape)
        for copy in range(rng.randint(1, 3)):
            taken: dict[int, list[Box]] = defaultdict(list)
            for box in _cut(whole, rng):
                if copy == 0 or rng.random() < 0.5:
                    taken[rng.randrange(ranks)].append(box)
            for rank, boxes in taken.items():
                source[rank] += _shards(tensor, boxes, f"{tensor.name}.{copy}", rng)
        for rank in range(first_target, first_target + rng.randint(1, 5)):
            boxes = [box for box in _cut(whole, rng) if rng.random() < 0.7]
            target[rank] += _shards(tensor, boxes, tensor.name, rng)
    return source, target


def _cut(box: Box, rng: Random) -> list[Box]:
    """Parts of the box, cut recursively at random places."""
    wide = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not wide or rng.random() < 0.3:
        return [box]
    dim = rng.choice(wide)
    at = rng.randint(box.start[dim] + 1, box.stop[dim] - 1)
    stop, start = list(box.stop), list(box.start)
    stop[dim] = start[dim] = at
    return _cut(Box(box.start, tuple(stop)), rng) + _cut(Box(tuple(start), box.stop), rng)


def _shards(tensor: TensorSpec, boxes: Sequence[Box], name: str, rng: Random) -> list[Shard]:
    """Shards of one parameter that is the tensor with an offset, or of one parameter per box."""
    if rng.random() < 0.5:
        by = [rng.randint(0, 2) for _ in tensor.shape]
        return [Shard(tensor, box, name, tuple(map(sum, zip(box.start, by, strict=True)))) for box in boxes]
    return [
        Shard(tensor, box, f"{name}.{i}", (0,) * len(tensor.shape), rng.randint(0, 1)) for i, box in enumerate(boxes)
    ]


class Numbered:
    """Both sides as arrays: every element of every tensor has a unique number; -1: not written."""

    def __init__(self, source: Side, target: Side) -> None:
        self._numbers: dict[str, np.ndarray] = {}
        self._count = 0
        self.source, self.target = source, target
        self._read, self._written = self._arrays(source), self._arrays(target)
        for rank, shards in source.items():
            for shard in shards:
                self._read[self._name(rank, shard)][shard.local_box.slices] = self._elements(shard).reshape(
                    shard.local_box.shape
                )

    def carry_out(self, plan: ReshardPlan) -> None:
        """Execute the plan: copy inside ranks, then send bucket by bucket. Asserts that no element is written twice."""
        ranks = sorted({*self.source, *self.target})
        for rank in ranks:
            for copy in plan.local(rank):
                assert copy.source_rank == copy.target_rank == rank
                self._write(copy, self._taken(copy))
        sends, receives = ({rank: of(rank) for rank in ranks} for of in (plan.sends, plan.receives))
        for bucket in range(plan.num_buckets):
            messages: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
            for rank in ranks:
                receivers = [copy.target_rank for copy in sends[rank][bucket]]
                assert receivers == sorted(receivers)
                for copy in sends[rank][bucket]:
                    messages[rank, copy.target_rank].append(self._taken(copy))
            assert messages, "an empty bucket"
            for rank in ranks:
                for copy in receives[rank][bucket]:
                    self._write(copy, messages[copy.source_rank, rank].pop(0))
            assert not any(messages.values()), "sent but not received"

    def carry_out_staged(self, syncs: Iterable[Copy], forwards: Iterable[Copy]) -> None:
        """Execute a staged plan, bucket by bucket. Asserts that ranks forward what they have received."""
        for _, number, copy in sorted(
            ((copy.bucket, number, copy) for number, copies in enumerate((syncs, forwards)) for copy in copies),
            key=lambda found: found[:2],
        ):
            values = self._taken(copy, self._written if number else self._read)
            assert (values >= 0).all(), "forwarded before it was received"
            self._write(copy, values)

    def assert_filled(self) -> None:
        """Assert that each element of the target has its source's number and that nothing else was written."""
        for rank, shards in self.target.items():
            for shard in shards:
                place = self._written[self._name(rank, shard)][shard.local_box.slices]
                assert (place.reshape(shard.box.shape) == self._elements(shard)).all(), (rank, shard)
                place[...] = -1
        assert all((array == -1).all() for array in self._written.values())

    def lacking(self, rank: int, itemsize: int) -> int:
        """Bytes that the rank needs and does not hold, counted by element."""
        held, lacking = self.held([rank]), 0
        for shard in self.target.get(rank, ()):
            lacking += (~held[self._elements(shard)]).sum() * (4 if shard.tensor.float32 else itemsize)
        return int(lacking)

    def held(self, ranks: Iterable[int]) -> np.ndarray:
        """For each element, whether one of the ranks holds it."""
        held = np.zeros(self._count, bool)
        for rank in ranks:
            for shard in self.source.get(rank, ()):
                held[self._elements(shard)] = True
        return held

    def wanted(self, copy: Copy) -> np.ndarray:
        """Numbers of the elements of a copy."""
        return self._elements(copy.target)

    def _arrays(self, side: Side) -> dict[tuple[int, int, str], np.ndarray]:
        stops: dict[tuple[int, int, str], list[tuple[int, ...]]] = defaultdict(list)
        for rank, shards in side.items():
            for shard in shards:
                stops[self._name(rank, shard)].append(shard.local_box.stop)
        return {name: np.full([max(sizes) for sizes in zip(*each, strict=True)], -1) for name, each in stops.items()}

    def _taken(self, copy: Copy, arrays: dict[tuple[int, int, str], np.ndarray] | None = None) -> np.ndarray:
        array = (arrays or self._read)[self._name(copy.source_rank, copy.source)][copy.source.local_box.slices]
        assert array.size == copy.box.volume, "outside the parameter"
        return array.flatten()

    def _write(self, copy: Copy, numbers: np.ndarray) -> None:
        place = self._written[self._name(copy.target_rank, copy.target)][copy.target.local_box.slices]
        assert (place == -1).all(), f"written twice: {copy}"
        place[...] = numbers.reshape(place.shape)

    def _name(self, rank: int, shard: Shard) -> tuple[int, int, str]:
        return rank, shard.chunk, shard.local_name

    def _elements(self, shard: Shard) -> np.ndarray:
        tensor = shard.tensor
        if tensor.name not in self._numbers:
            size = prod(tensor.shape)
            self._numbers[tensor.name] = self._count + np.arange(size).reshape(tensor.shape)
            self._count += size
        return self._numbers[tensor.name][shard.box.slices]
