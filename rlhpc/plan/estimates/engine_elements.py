"""Number of elements of the parameters that a rank of an engine holds."""

from __future__ import annotations

from math import ceil, prod

from rlhpc.models import ModelDescription, ModelShape, TensorHeader, find_family
from rlhpc.models.tables import Cut, Row, Where
from rlhpc.sharding.engine_shards import EngineLayout, engine_vocab


def engine_numel(shape: ModelDescription, layout: EngineLayout) -> int:
    """Returns the elements of one rank's parameters (``engine_parameters``); for a model without a table as if vLLM
    sharded all matrices and nothing else, which is exact for one rank."""
    if not isinstance(shape, ModelShape):
        matrices = sum(_engine_matrix(tensor) for tensor in shape.tensors if _is_sharded(tensor))
        return sum(tensor.numel for tensor in shape.tensors if not _is_sharded(tensor)) + ceil(matrices / layout.tp)
    expert_layers = len(shape.experts.layers) if shape.experts else 0
    layers = {
        Where.LAYER: shape.num_layers,
        Where.DENSE_LAYER: shape.num_layers - expert_layers,
        Where.EXPERT_LAYER: expert_layers,
    }
    return sum(
        layers.get(row.where, 1) * _engine_row(shape, layout, row) for row in find_family(shape.family).table(shape)
    )


def _is_sharded(tensor: TensorHeader) -> bool:
    """Returns whether tensor parallelism of an engine cuts a tensor: matrices, but those to latent vectors."""
    return len(tensor.shape) > 1 and "_a_proj" not in tensor.name


def _engine_matrix(tensor: TensorHeader) -> int:
    """Returns the elements of a matrix or stack in an engine of one rank."""
    padded = tensor.of_embedding or tensor.of_head
    return engine_vocab(tensor.shape[0]) * prod(tensor.shape[1:]) if padded else tensor.numel


def _engine_row(shape: ModelShape, layout: EngineLayout, row: Row) -> int:
    numel = prod(row.shape)
    if row.of_each_expert:
        assert shape.experts is not None, "a row for each expert of a model that has none"
        return shape.experts.num_experts // layout.ep * numel // layout.etp
    if row.cut is Cut.WHOLE:
        return numel
    if row.cut is Cut.VOCAB:
        return engine_vocab(row.shape[0]) // layout.tp * prod(row.shape[1:])
    if row.cut is Cut.QKV and row.part > 0:  # more ranks than heads hold copies
        return numel // shape.num_kv_heads * max(1, shape.num_kv_heads // layout.tp)
    return numel // layout.tp
