"""A model in Megatron's torch_dist checkpoints: whole tensors by key, in coordinates independent of the layout.

Uniform layers are stacked into one tensor, with the layer as its first dimension; if only some layers have experts, all
are saved one by one. The layout determines only the chunks of a tensor, which any other layout can read.

Names of a layer's parameters are not those of our modules. megatron-core's layers keep a norm in the linear layer after
it, because Transformer Engine computes both in one operation. Its specs without Transformer Engine rename their norms
accordingly, but fewer of them (gpt_layer_specs.py, ``sharded_state_dict_keys_map``). Each can save the layers stacked
or one by one (transformer_block.py, ``sharded_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Literal

from rlhpc.core.errors import UserError
from rlhpc.models import Cut, ModelShape
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, Shard, megatron_shards, padded_vocab, tensor_places

LAYERS = "decoder.layers."
Spec = Literal["te", "local"]
_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_EXPERTS = {
    "mlp.experts.w13": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.w2": "mlp.experts.experts.linear_fc2.weight",
}
_CONVERT_AGAIN = "convert the model again from its HuggingFace files"
_LINEAR = (Cut.ROWS, Cut.COLUMNS, Cut.QKV, Cut.GATE_UP)
_OF_EXPERTS = (Cut.EXPERT_GATE_UP, Cut.EXPERT_DOWN)
_WITHOUT_STATE = re.compile(r"embedding\.|output_layer$")


@dataclass(frozen=True)
class NameForm:
    """Form of a checkpoint's names of parameters: the spec, and stacked layers or single ones."""

    spec: Spec
    stacked: bool

    def key(self, shape: ModelShape, name: str, layer: int | None) -> str:
        """Key of our parameter ``name`` of a whole model."""
        if layer is None:
            return name
        own = name.removeprefix(f"{LAYERS}{layer}.")
        renamed = renamed_parts(shape, layer, self.spec)
        old = next((old for old in renamed if own.startswith(old)), None)
        if old is not None:
            own = renamed[old] + own.removeprefix(old)
        return LAYERS + ("" if self.stacked else f"{layer}.") + own


def written_form(shape: ModelShape) -> NameForm:
    """The form that megatron-core writes by default with Transformer Engine."""
    return NameForm("te", stacked=has_uniform_layers(shape))


def has_uniform_layers(shape: ModelShape) -> bool:
    """True if all layers have experts, or none: only then megatron-core can stack them."""
    return shape.experts is None or len(shape.experts.layers) == shape.num_layers


def renamed_parts(shape: ModelShape, layer: int, spec: Spec = "te") -> dict[str, str]:
    """Beginnings of names inside a layer, by ours, that a checkpoint has otherwise."""
    has_experts = shape.experts is not None and layer in shape.experts.layers
    experts = _EXPERTS if has_experts else {}
    if spec == "local":
        return experts if shape.latent is not None else {**_INPUT_NORM, **_MLP_NORM, **experts}
    attention = _INPUT_NORM if shape.latent is None else _LATENT_NORMS
    return {**attention, **(experts if has_experts else _MLP_NORM)}


def found_form(shape: ModelShape, keys: Collection[str], folder: Path) -> NameForm:
    """The form of a checkpoint with these keys. Raises UserError for forms that cannot be read."""
    inside = [key.removeprefix(LAYERS) for key in keys if key.startswith(LAYERS)]
    if any(key.endswith((".experts.w13", ".experts.w2")) for key in inside) or _has_norms_of_modules(shape, inside):
        raise UserError(
            "was written by an older rlhpc, with names of parameters that megatron-core does not have",
            where=str(folder),
            remedy=_CONVERT_AGAIN,
        )
    if any(key.endswith(".weight_w") for key in inside):
        raise UserError(
            "has gate and up projections apart (singleton_local_shards), which is not supported",
            where=str(folder),
            remedy="save it without that option",
        )
    stacked = any(not key.partition(".")[0].isdigit() for key in inside)
    return NameForm("te" if _has_te_names(shape, inside) else "local", stacked)


def _has_norms_of_modules(shape: ModelShape, inside: Collection[str]) -> bool:
    """True if a model without latent attention has norms under the names of our modules."""
    return shape.latent is None and any(key.endswith("input_layernorm.weight") for key in inside)


def _has_te_names(shape: ModelShape, inside: Collection[str]) -> bool:
    """True if the names are those of the spec with Transformer Engine; if both have the same, yes."""
    if shape.latent is not None:
        return not any(key.endswith("self_attention.kv_layernorm.weight") for key in inside)
    if shape.experts is not None:
        return any(key.endswith("pre_mlp_layernorm.weight") for key in inside)
    return True


@dataclass(frozen=True)
class CheckpointParameter:
    """One parameter of an unsharded model: the part of tensor ``key`` at ``lead``, its layer if layers are stacked.

    ``shards`` are the boxes of HuggingFace's tensors that it consists of, with ``local_start`` inside ``shape``.
    """

    key: str
    shape: tuple[int, ...]
    cut: Cut
    shards: tuple[Shard, ...]
    layer: int | None = None
    stack: int | None = None  # layers that share the key
    float32: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        return () if self.stack is None else (int(self.layer or 0),)

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.stack is None else (self.stack, *self.shape)

    @property
    def pads(self) -> bool:
        """True if its rows are the vocabulary, whose padding depends on the layout."""
        return self.cut is Cut.VOCAB

    def with_rows(self, rows: int) -> CheckpointParameter:
        """Copy with another number of rows for the vocabulary."""
        return replace(self, shape=(rows, *self.shape[1:]))

    def in_key(self, box: Box) -> Box:
        """A box of the parameter in the coordinates of the key's tensor."""
        return Box((*self.lead, *box.start), (*(at + 1 for at in self.lead), *box.stop))

    def within(self, box: Box) -> Iterator[tuple[Shard, Box]]:
        """Parts of shards that a box of the parameter consists of, and the box of each in the parameter."""
        for (first, last), held in self._by_rows.items():
            if first >= box.stop[0] or last <= box.start[0]:
                continue
            for shard, local in held:
                met = local.meet(box)
                if met is None:
                    continue
                lead = len(met.start) - len(shard.box.start)
                ahead = [a - b for a, b in zip(met.start, local.start, strict=True)][lead:]
                start = tuple(a + b for a, b in zip(shard.box.start, ahead, strict=True))
                stop = tuple(a + n for a, n in zip(start, met.shape[lead:], strict=True))
                yield shard.part(Box(start, stop)), met

    @cached_property
    def _by_rows(self) -> dict[tuple[int, int], list[tuple[Shard, Box]]]:
        """Shards by their range of the first dimension, because a stack of experts has thousands."""
        found: dict[tuple[int, int], list[tuple[Shard, Box]]] = {}
        for shard in self.shards:
            box = shard.local_box
            found.setdefault((box.start[0], box.stop[0]), []).append((shard, box))
        return found


def checkpoint_parameters(shape: ModelShape, tp: int = 1, form: NameForm | None = None) -> list[CheckpointParameter]:
    """Every parameter, in order of layers; rows of embedding and head are padded for ``tp``.

    ``form``: of the names, by default the one that is written.
    """
    shards: dict[str, list[Shard]] = {}
    for shard in megatron_shards(shape, ParallelLayout(1), 0):
        shards.setdefault(shard.local_name, []).append(shard)
    cuts = {place.local_name: (place.row, place.tensor.layer) for place in tensor_places(shape)}
    form = form or written_form(shape)
    found = []
    for name, held in shards.items():
        row, layer = cuts[name]
        stack = shape.num_layers if form.stacked and layer is not None else None
        size = [max(stops) for stops in zip(*(shard.local_box.stop for shard in held), strict=True)]
        if row.cut is Cut.VOCAB:
            size[0] = padded_vocab(size[0], tp)
        key = form.key(shape, name, layer)
        found.append(CheckpointParameter(key, tuple(size), row.cut, tuple(held), layer, stack, row.float32))
    return found


def places_of(parameters: Iterable[CheckpointParameter]) -> dict[str, list[tuple[CheckpointParameter, Shard]]]:
    """Parameters that contain each HuggingFace tensor, with its shards."""
    found: dict[str, list[tuple[CheckpointParameter, Shard]]] = {}
    for parameter in parameters:
        for shard in parameter.shards:
            found.setdefault(shard.tensor.name, []).append((parameter, shard))
    return found


def extra_states(parameters: list[CheckpointParameter], *, linear: bool = False) -> list[str]:
    """Keys of the states that modules save beside their weights and require on loading; empty but in FP8.

    They are those of Transformer Engine's modules. ``linear``: only those of Megatron's own linear layers.
    """
    keys: dict[str, None] = {}
    for parameter in parameters:
        module, _, kind = parameter.key.rpartition(".")
        has_state = parameter.cut in _LINEAR if linear else not (_WITHOUT_STATE.match(module) or ".router" in module)
        if not has_state or kind not in ("weight", "layer_norm_weight"):
            continue
        at, of = ((0,), (1,)) if parameter.stack is None else (parameter.lead, (parameter.stack,))
        places = [at]
        if parameter.cut in _OF_EXPERTS:
            of = (*of[: len(parameter.lead)], parameter.shape[0])
            places = [(*parameter.lead, expert) for expert in range(parameter.shape[0])]
        keys |= {f"{module}._extra_state/{_part(place, of)}": None for place in places}
        if module.endswith("self_attention.linear_proj") and not linear:
            keys[f"{module.removesuffix('linear_proj')}core_attention._extra_state/{_part(at, of)}"] = None
    return list(keys)


def _part(at: tuple[int, ...], of: tuple[int, ...]) -> str:
    return f"shard_{'.'.join(map(str, at))}_{'.'.join(map(str, of))}"


def chunk_boxes(parameter: CheckpointParameter, layout: ParallelLayout, max_elements: int) -> list[Box]:
    """Boxes of a parameter on the layout's ranks, split further by rows to at most ``max_elements``."""
    parts = [1] * len(parameter.shape)
    match parameter.cut:
        case Cut.ROWS | Cut.QKV | Cut.VOCAB:
            parts[0] = layout.tp
        case Cut.COLUMNS:
            parts[1] = layout.tp
        case Cut.GATE_UP:
            parts[0] = 2 * layout.tp
        case Cut.EXPERT_GATE_UP:
            parts[0], parts[1] = layout.ep, 2 * layout.etp
        case Cut.EXPERT_DOWN:
            parts[0], parts[2] = layout.ep, layout.etp
        case Cut.WHOLE:
            pass
    sizes = [n // p for n, p in zip(parameter.shape, parts, strict=True)]
    assert all(n % p == 0 for n, p in zip(parameter.shape, parts, strict=True)), (
        f"{parameter.key} does not divide evenly"
    )
    boxes = []
    for index in product(*map(range, parts)):
        start = tuple(i * n for i, n in zip(index, sizes, strict=True))
        boxes += cut_box(Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True))), max_elements)
    return boxes


def cut_box(box: Box, max_elements: int) -> list[Box]:
    """Splits a box along its first dimensions into parts of at most ``max_elements``, or single rows."""
    if box.volume <= max_elements or len(box.start) == 0:
        return [box]
    dim = next((d for d, n in enumerate(box.shape[:-1]) if n > 1), len(box.start) - 1)
    step = max(1, max_elements // prod(box.shape[dim + 1 :]))
    parts = []
    for at in range(box.start[dim], box.stop[dim], step):
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = at, min(at + step, box.stop[dim])
        parts += cut_box(Box(tuple(start), tuple(stop)), max_elements)
    return parts


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """True if the boxes contain every element of ``shape`` exactly once."""
    inside = all(len(box.start) == len(shape) and Box((0,) * len(shape), shape).meet(box) == box for box in boxes)
    return inside and sum(box.volume for box in boxes) == prod(shape) and not _overlap(boxes, 0)


def _overlap(boxes: list[Box], dim: int) -> bool:
    """True if any two boxes overlap. Boxes in a grid are separated dimension by dimension."""
    if len(boxes) < 2:
        return False
    if dim == len(boxes[0].start):
        return True
    columns: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        columns.setdefault((box.start[dim], box.stop[dim]), []).append(box)
    spans = sorted(columns)
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        return any(a.meet(b) for i, a in enumerate(boxes) for b in boxes[:i])
    return any(_overlap(column, dim + 1) for column in columns.values())
