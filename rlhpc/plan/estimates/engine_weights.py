"""Weights on an engine's rank: those of the policy, and of a second model or head that guesses tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from pathlib import Path

from rlhpc.checkpoint.formats.described import read_tensors
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape, TensorHeader, find_family, read_model
from rlhpc.models.heads import EagleHead, read_head
from rlhpc.models.tables import Cut, Row, Where
from rlhpc.plan.estimates.rank_memory import ITEMSIZE
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


_LONG = 8  # bytes of a place in a head's table of tokens


def draft_shape(section: RolloutSection) -> ModelShape | None:
    """Returns the shape of the second model, None without one. Raises UserError for a model of no known family."""
    guesses = section.speculative
    return (
        None if guesses is None or guesses.method != "draft_model" or guesses.model is None else _shape(guesses.model)
    )


def draft_head(section: RolloutSection) -> EagleHead | None:
    """Returns the head of eagle and eagle3, None without one. Raises UserError for a folder without one."""
    guesses = section.speculative
    if guesses is None or guesses.method not in ("eagle", "eagle3") or guesses.model is None:
        return None
    return read_head(guesses.model, guesses.method)


def draft_weights(section: RolloutSection, policy: ModelDescription, dtype: str) -> int:
    """Returns the bytes of the weights that guess on a rank of an engine, 0 without any. vLLM has them in the policy's
    type."""
    shape, head, guesses = draft_shape(section), draft_head(section), section.speculative
    if shape is not None:
        return ITEMSIZE[dtype] * engine_numel(shape, EngineLayout(section.tp))
    if head is not None:
        assert guesses is not None
        assert guesses.model is not None
        tables = sum(engine_vocab(rows) * columns for rows, columns in _own_tables(guesses.model, head)) // section.tp
        places = (_LONG - ITEMSIZE[dtype]) * head.draft_vocab_size if head.maps else 0
        return ITEMSIZE[dtype] * (head.numel(section.tp) + tables) + places
    if guesses is not None and guesses.method == "mtp":
        return ITEMSIZE[dtype] * _mtp_numel(policy, EngineLayout(section.tp, section.expert_parallel))
    return 0


def draft_kv_elements(section: RolloutSection, policy: ModelDescription) -> int:
    """Returns the elements of keys and values for each token on a rank of an engine."""
    model = draft_shape(section) or draft_head(section)
    if model is not None:
        return model.num_layers * 2 * max(1, model.num_kv_heads // section.tp) * model.head_dim
    if section.speculative is None or section.speculative.method != "mtp":
        return 0
    if policy.latent is not None:
        return policy.latent.kv_rank + policy.latent.rope_dim
    return 2 * max(1, policy.num_kv_heads // section.tp) * policy.head_dim


def _mtp_numel(policy: ModelDescription, layout: EngineLayout) -> int:
    """Elements of one multi-token-prediction layer: a layer like the policy's last, and a matrix that joins a token's
    embedding with a hidden state."""
    hidden = policy.hidden_size
    return _last_layer(policy, layout) + 2 * hidden * hidden + 3 * hidden


def _last_layer(policy: ModelDescription, layout: EngineLayout) -> int:
    last = f".layers.{policy.num_layers - 1}."
    if not isinstance(policy, ModelShape):
        return sum(prod(tensor.shape) for tensor in policy.tensors if last in tensor.name) // layout.tp
    number, experts = policy.num_layers - 1, policy.experts
    if experts is not None:
        experts = replace(experts, layers=tuple(layer for layer in experts.layers if layer < number))
    return engine_numel(policy, layout) - engine_numel(replace(policy, num_layers=number, experts=experts), layout)


@lru_cache(maxsize=8)
def _own_tables(folder: Path, head: EagleHead) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tables in a head's files that are the policy's otherwise; none where there are no files."""
    try:
        names = {tensor.name for tensor in read_tensors(folder)}
    except UserError:
        return ()
    return tuple(shape for name, shape in head.tables.items() if name in names)


@lru_cache(maxsize=8)  # a search needs it per layout
def _shape(folder: Path) -> ModelShape:
    return read_model(folder)
