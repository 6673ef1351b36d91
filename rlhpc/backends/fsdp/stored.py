"""Weights of a transformers model as its files store them, as blocks of its parameters.

transformers stacks and joins weights of a file into parameters: the experts of a layer are one parameter. Its own
conversion from parameters to files runs here on traces, which have a shape and no data, and record what becomes what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from rlhpc.core.errors import UserError
from rlhpc.sharding.mesh_sizes import MeshSizes, held_rows
from rlhpc.sharding.shards import Box, Shard, TensorSpec

_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class ModelWeight:
    """A parameter or persistent buffer. ``sharded``: along its first dimension; else each rank holds it whole."""

    shape: tuple[int, ...]
    sharded: bool
    float32: bool = False


@dataclass(frozen=True)
class StoredPiece:
    """``box`` of a stored tensor, which begins at ``start`` in a parameter with possibly more, leading dimensions.

    ``rows``: the size of the parameter's first dimension, over which it is sharded; None if every rank holds it whole.
    """

    box: Box
    parameter: str
    start: tuple[int, ...]
    rows: int | None


@dataclass(frozen=True)
class StoredWeight:
    """A tensor by HuggingFace's name, and its pieces in the model's parameters."""

    tensor: TensorSpec
    pieces: tuple[StoredPiece, ...]


class _UnknownConversion(Exception):
    """A conversion does more than cut and join."""


@dataclass(frozen=True)
class _Part:
    """``box`` of a trace, in its coordinates, and its place in a parameter; ``dims``: the parameter's dimensions that
    the trace has."""

    box: Box
    parameter: str
    start: tuple[int, ...]
    dims: tuple[int, ...]


@dataclass(frozen=True)
class _Trace:
    """Acts as a tensor in transformers' conversions."""

    shape: tuple[int, ...]
    parts: tuple[_Part, ...]

    @classmethod
    def __torch_function__(cls, function: Callable, _: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        name = function.__name__
        if name == "chunk":
            return _chunks(*args, **(kwargs or {}))
        if name == "cat":
            return _join(*args, **(kwargs or {}))
        raise _UnknownConversion(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _UnknownConversion(name)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> _Trace:
        return self

    def squeeze(self) -> _Trace:
        """Trace without dimensions of size 1."""
        kept = [dim for dim, size in enumerate(self.shape) if size != 1]

        def of(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[dim] for dim in kept)

        parts = [replace(p, box=Box(of(p.box.start), of(p.box.stop)), dims=of(p.dims)) for p in self.parts]
        return _Trace(of(self.shape), tuple(parts))


def _chunks(trace: _Trace, chunks: int, dim: int = 0) -> tuple[_Trace, ...]:
    dim %= len(trace.shape)
    size = trace.shape[dim]
    step = -(-size // chunks)
    return tuple(_cut(trace, dim, first, min(first + step, size)) for first in range(0, size, step))


def _cut(trace: _Trace, dim: int, first: int, last: int) -> _Trace:
    """The block from ``first`` to ``last`` along a dimension."""
    window = Box(_with((0,) * len(trace.shape), dim, first), _with(trace.shape, dim, last))
    parts = []
    for part in trace.parts:
        if (box := part.box.meet(window)) is not None:
            own = part.dims[dim]
            start = _with(part.start, own, part.start[own] + box.start[dim] - part.box.start[dim])
            parts.append(replace(part, box=_moved(box, dim, -first), start=start))
    return _Trace(_with(trace.shape, dim, last - first), tuple(parts))


def _join(traces: Sequence[_Trace], dim: int = 0) -> _Trace:
    dim, at, parts = dim % len(traces[0].shape), 0, []
    for trace in traces:
        parts += [replace(part, box=_moved(part.box, dim, at)) for part in trace.parts]
        at += trace.shape[dim]
    return _Trace(_with(traces[0].shape, dim, at), tuple(parts))


def _moved(box: Box, dim: int, by: int) -> Box:
    return Box(_with(box.start, dim, box.start[dim] + by), _with(box.stop, dim, box.stop[dim] + by))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def keep_conversion(model: PreTrainedModel) -> None:
    """Notes how transformers converts the model's files. It looks that up by the name of the model's class, which
    ``fully_shard`` replaces. Prefixes stay as they are, as for any model that it did not load itself."""
    found = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [step for step in found if not isinstance(step, PrefixChange)]


def stored_weights(model: Module, sources: Mapping[str, ModelWeight]) -> list[StoredWeight]:
    """Every weight of a transformers model by HuggingFace's name, in the order of its files' names.

    ``sources``: its parameters and persistent buffers, tied ones once. Raises UserError if transformers does more than
    cut and join to convert them.
    """
    traces = {}
    for name, source in sources.items():
        part = _Part(
            Box((0,) * len(source.shape), source.shape), name, (0,) * len(source.shape), tuple(range(len(source.shape)))
        )
        traces[name] = _Trace(source.shape, (part,))
    try:
        stored = revert_weight_conversion(model, traces)
        return [_weight(name, trace, sources) for name, trace in stored.items()]
    except _UnknownConversion as conversion:
        raise UserError(
            f"weights of {type(model).__name__} are converted from its files by {str(conversion)!r}",
            where="model.path",
            remedy="use a model whose weights are stored as they are, stacked or joined",
        ) from None


def _weight(name: str, trace: _Trace, sources: Mapping[str, ModelWeight]) -> StoredWeight:
    pieces, experts = [], set()
    for part in trace.parts:
        source = sources[part.parameter]
        lead = len(source.shape) - len(trace.shape)
        if part.dims != tuple(range(lead, len(source.shape))):
            raise _UnknownConversion("squeeze")
        experts |= {part.start[0]} if lead else set()
        pieces.append(StoredPiece(part.box, part.parameter, part.start, source.shape[0] if source.sharded else None))
    numbers = _NUMBER.search(name)
    float32 = all(sources[piece.parameter].float32 for piece in pieces)
    layer, expert = int(numbers[1]) if numbers else None, experts.pop() if len(experts) == 1 else None
    return StoredWeight(TensorSpec(name, trace.shape, layer, expert, float32), tuple(pieces))


def rank_shards(weights: Iterable[StoredWeight], sizes: MeshSizes, rank: int) -> list[Shard]:
    """The shards of one rank, without empty ones. ``local_start`` is in the local part of the parameter."""
    index = sizes.shard_index(rank)
    found = []
    for weight in weights:
        for piece in weight.pieces:
            shard = Shard(weight.tensor, piece.box, piece.parameter, piece.start)
            if piece.rows is not None:
                shard = _held(shard, held_rows(piece.rows, sizes.shards, index))
            found += [shard] if shard else []
    return found


def shards_holding(weight: StoredWeight, sizes: MeshSizes) -> list[int]:
    """Indices of the shards of a copy that contain some of the weight, ascending."""
    found: set[int] = set()
    for piece in weight.pieces:
        if piece.rows is None:
            return list(range(sizes.shards))
        each = -(-piece.rows // sizes.shards)
        stack = len(piece.start) > len(piece.box.start)
        last = piece.start[0] + (0 if stack else piece.box.shape[0] - 1)
        found |= set(range(piece.start[0] // each, last // each + 1))
    return sorted(found)


def _held(shard: Shard, rows: range) -> Shard | None:
    """The part of a shard of a whole parameter that lies in ``rows`` of it, in their coordinates."""
    first, last = shard.local_start[0], shard.local_box.stop[0]
    start, stop = max(first, rows.start), min(last, rows.stop)
    if start >= stop:
        return None
    if len(shard.local_start) == len(shard.box.start):  # else the row is one tensor of a stack
        at = shard.box.start[0] - first
        shard = shard.part(Box(_with(shard.box.start, 0, at + start), _with(shard.box.stop, 0, at + stop)))
    return replace(shard, local_start=_with(shard.local_start, 0, start - rows.start))
