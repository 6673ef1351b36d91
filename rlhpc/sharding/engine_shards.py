"""Part of the model that each rank of an engine holds, and vLLM's parameters that contain it.

vLLM shards every kind of weight in one way (model_executor/layers/linear.py, vocab_parallel_embedding.py,
fused_moe/layer.py), which follows from the kind of sharding in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlhpc.models import ModelShape
from rlhpc.models.tables import Cut, Row
from rlhpc.sharding.shards import Place, Shard, place_shard, tensor_places

VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of it (DEFAULT_VOCAB_PADDING_SIZE)


@dataclass(frozen=True)
class EngineLayout:
    """Layout of the ``tp`` ranks of an engine. With ``expert_parallel`` each holds whole experts instead of parts."""

    tp: int
    expert_parallel: bool = False

    @property
    def etp(self) -> int:
        return 1 if self.expert_parallel else self.tp

    @property
    def ep(self) -> int:
        return self.tp if self.expert_parallel else 1


def fits_nodes(tp: int, ranks_per_node: int) -> bool:
    """True if each engine of ``tp`` consecutive ranks is within a node, or on whole nodes."""
    return ranks_per_node % tp == 0 or tp % ranks_per_node == 0


def engine_shards(shape: ModelShape, layout: EngineLayout, tp_rank: int) -> list[Shard]:
    """Shards of one rank of an engine, in the order of the model's tensors; a layer's experts are one tensor."""
    return [
        shard for place in _engine_places(shape, layout, tp_rank) for shard in _shards(shape, place, layout, tp_rank)
    ]


def engine_parameters(shape: ModelShape, layout: EngineLayout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of an engine; equal on all its ranks."""
    parameters: dict[str, tuple[int, ...]] = {}
    for place in _engine_places(shape, layout, 0):
        size = _local_shape(shape, place, layout)
        before = parameters.get(place.local_name)
        # Tensors fused into one parameter are concatenated along its rows, the last dimension but one.
        rows = size[-2 if len(size) > 1 else 0] + (before[-2 if len(before) > 1 else 0] if before else 0)
        parameters[place.local_name] = (*size[:-2], rows, size[-1]) if len(size) > 1 else (rows,)
    return parameters


def _engine_places(shape: ModelShape, layout: EngineLayout, tp_rank: int) -> Iterator[Place]:
    """Every tensor of the model with the engine's parameter in place of the trainer's."""
    for place in tensor_places(shape, stacked=True):
        local_name = _parameter_name(place.row).format(layer=place.tensor.layer)
        experts = place.experts
        if place.row.of_each_expert:
            each = len(experts) // layout.ep
            mine = tp_rank if layout.expert_parallel else 0
            experts = range(each * mine, each * (mine + 1))
        yield replace(place, local_name=local_name, experts=experts, stage=0, chunk=0)


def _parameter_name(row: Row) -> str:
    """Name of vLLM's parameter: it fuses q, k and v, and gate and up, and stacks experts."""
    if row.engine_name:
        return row.engine_name
    match row.cut:
        case Cut.EXPERT_GATE_UP:
            return row.hf_name.partition("{expert}")[0] + "routed_experts.w13_weight"
        case Cut.EXPERT_DOWN:
            return row.hf_name.partition("{expert}")[0] + "routed_experts.w2_weight"
        case Cut.QKV | Cut.GATE_UP:
            module, _, kind = row.hf_name.rpartition(".")
            fused = "qkv_proj" if row.cut is Cut.QKV else "gate_up_proj"
            return f"{module.rpartition('.')[0]}.{fused}.{kind}"
    return row.hf_name


def _shards(shape: ModelShape, place: Place, layout: EngineLayout, tp_rank: int) -> list[Shard]:
    row, tp = place.row, layout.etp if place.row.of_each_expert else layout.tp
    rank = tp_rank % tp
    match row.cut:
        case Cut.WHOLE:
            return [place_shard(place, 0, 0, row.shape[0], row.engine_start)]
        case Cut.COLUMNS | Cut.EXPERT_DOWN:
            part = row.shape[1] // tp
            return [place_shard(place, 1, rank * part, (rank + 1) * part, 0)]
        case Cut.VOCAB:
            part = engine_vocab(row.shape[0]) // tp
            start, stop = rank * part, min((rank + 1) * part, row.shape[0])
            return [place_shard(place, 0, start, stop, 0)] if start < stop else []
        case Cut.ROWS:
            part = row.shape[0] // tp
            return [place_shard(place, 0, rank * part, (rank + 1) * part, row.engine_start)]
        case Cut.GATE_UP | Cut.EXPERT_GATE_UP:
            part = row.shape[0] // tp
            return [place_shard(place, 0, rank * part, (rank + 1) * part, row.part * part)]
        case Cut.QKV:
            start, size, local = _heads(shape, row.part, tp, rank)
            return [place_shard(place, 0, start, start + size, local)]


def _heads(shape: ModelShape, part: int, tp: int, rank: int) -> tuple[int, int, int]:
    """(first row, rows, row in the fused parameter) of the rank's q, k or v heads: all q, then all k, then all v.

    With more ranks than key-value heads, consecutive ranks hold copies of the same head.
    """
    queries, keys = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    first = rank * queries if part == 0 else rank * shape.num_kv_heads // tp
    count = queries if part == 0 else keys
    before = (0, queries, queries + keys)[part]
    return first * shape.head_dim, count * shape.head_dim, before * shape.head_dim


def _local_shape(shape: ModelShape, place: Place, layout: EngineLayout) -> tuple[int, ...]:
    """Shape that the place's tensor has in its parameter, including the padding of the vocabulary."""
    row = place.row
    if row.cut is Cut.VOCAB:
        return engine_vocab(row.shape[0]) // layout.tp, row.shape[1]
    return _shards(shape, place, layout, 0)[0].box.shape


def engine_vocab(size: int) -> int:
    """Rows of embedding and head in the engine, over all ranks."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
