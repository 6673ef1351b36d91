"""Second models and heads, which guess tokens by weights of their own: their shapes, and memory on an engine's rank."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path

from rlhpc.checkpoint.formats.described import read_tensors
from rlhpc.config.rollout import RolloutSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape, read_model
from rlhpc.models.heads import EagleHead, read_head
from rlhpc.plan.estimates.engine_elements import engine_numel
from rlhpc.plan.estimates.optimizer_memory import ITEMSIZE
from rlhpc.sharding.engine_shards import EngineLayout, engine_vocab

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
