"""Sides of a weight sync for a model without a table: the trainers' own shards, and what engines discover of theirs."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch.distributed as dist

from rlhpc.api import RolloutEngine, TrainBackend
from rlhpc.core.errors import UserError
from rlhpc.reshard.plan import Side, cells_of
from rlhpc.reshard.sides import SyncSides
from rlhpc.sharding.shards import Box, Shard, TensorSpec

_NAMED = 4  # tensors that an error names


class Exchange(Protocol):
    """Passes bytes among the ranks of both sides. ``rank``: this one's number in the job."""

    rank: int

    def gather(self, topic: str, mine: bytes) -> Mapping[int, bytes]:
        """Values that every rank passes about a topic, by rank. Collective."""


class GroupExchange:
    """Implements ``Exchange`` by a process group; None: all ranks of the job."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self._group = dist.get_rank(), group

    def gather(self, topic: str, mine: bytes) -> Mapping[int, bytes]:
        """See ``Exchange``."""
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, mine, group=self._group)
        return dict(zip(ranks, found, strict=True))


def discover_sides(actor: TrainBackend | None, engine: RolloutEngine | None, exchange: Exchange) -> SyncSides:
    """Both sides of a weight sync, from each rank's actor or engine or both. Engines discover their layouts in the
    memory that the actor leaves them, and sleep afterwards. Collective over both sides' ranks; raises the same
    UserError on all of them."""
    source = _gather("trained weights", None if actor is None else actor.shards, exchange)
    tensors = tensors_of(source)
    if actor is not None and engine is not None:
        actor.offload()
    target = _gather("served weights", None if engine is None else lambda: engine.discover_shards(tensors), exchange)
    missing = not_covered(tensors, target)
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise UserError(
            f"vLLM's parameters lack weights that are trained: {', '.join(missing[:_NAMED])}{more}",
            where="rollout",
            remedy="use a model whose weights vLLM loads as they are trained",
        )
    return SyncSides(_as_served(source, target), target)


def _as_served(source: Side, target: Side) -> Side:
    """The source side, in the model's dtype for float32 tensors that engines have in it."""
    served = {tensor.name for tensor in tensors_of(target) if not tensor.float32}
    narrowed = {tensor for tensor in tensors_of(source) if tensor.float32 and tensor.name in served}
    if not narrowed:
        return source
    lists = {id(shards): [_narrowed(shard, narrowed) for shard in shards] for shards in source.values()}
    return {rank: lists[id(shards)] for rank, shards in source.items()}


def _narrowed(shard: Shard, tensors: Collection[TensorSpec]) -> Shard:
    return replace(shard, tensor=replace(shard.tensor, float32=False)) if shard.tensor in tensors else shard


def tensors_of(side: Side) -> list[TensorSpec]:
    """Every tensor of a side once, in the order of the ranks and their shards."""
    return list(dict.fromkeys(shard.tensor for rank in sorted(side) for shard in side[rank]))


def not_covered(tensors: Iterable[TensorSpec], side: Side) -> list[str]:
    """Names of the tensors of which the ranks of a side together do not have every element."""
    boxes: dict[TensorSpec, dict[Box, None]] = {}
    for shards in {id(shards): shards for shards in side.values()}.values():
        for shard in shards:
            boxes.setdefault(shard.tensor, {})[shard.box] = None
    held = {tensor.name: sum(cell.volume for cell, _ in cells_of(tuple(own))) for tensor, own in boxes.items()}
    return [tensor.name for tensor in tensors if held.get(tensor.name, 0) != prod(tensor.shape)]


def _gather(topic: str, shards: Callable[[], Sequence[Shard]] | None, exchange: Exchange) -> Side:
    """The shards of all ranks that have any. Ranks with equal ones share a list, which the first of them sends."""
    content, error = b"", None
    try:
        content = encode_shards(shards()) if shards is not None else b""
    except UserError as refused:
        error = [refused.message, refused.where, refused.remedy]
    own = {"digest": hashlib.sha256(content).hexdigest() if content else None, "error": error}
    replies = exchange.gather(f"digests of {topic}", json.dumps(own).encode())
    everyone = {rank: json.loads(reply) for rank, reply in sorted(replies.items())}
    for found in everyone.values():
        if found["error"]:
            message, where, remedy = found["error"]
            raise UserError(message, where=where, remedy=remedy)
    firsts: dict[str, int] = {}
    for rank, found in everyone.items():
        if found["digest"]:
            firsts.setdefault(found["digest"], rank)
    sent = exchange.gather(topic, content if exchange.rank in firsts.values() else b"")
    lists = {digest: decode_shards(sent[rank]) for digest, rank in firsts.items()}
    return {rank: lists[found["digest"]] for rank, found in everyone.items() if found["digest"]}


def encode_shards(shards: Sequence[Shard]) -> bytes:
    """Shards as bytes, equal for equal ones."""
    tensors = {tensor: number for number, tensor in enumerate(dict.fromkeys(shard.tensor for shard in shards))}
    names = {name: number for number, name in enumerate(dict.fromkeys(shard.local_name for shard in shards))}
    specs = [[spec.name, spec.shape, spec.layer, spec.expert, spec.float32] for spec in tensors]
    blocks = [[tensors[s.tensor], s.box.start, s.box.stop, names[s.local_name], s.local_start, s.chunk] for s in shards]
    return zlib.compress(json.dumps([specs, list(names), blocks]).encode())


def decode_shards(content: bytes) -> list[Shard]:
    """Shards that ``encode_shards`` encoded."""
    specs, names, blocks = json.loads(zlib.decompress(content))
    tensors = [TensorSpec(name, tuple(shape), layer, expert, float32) for name, shape, layer, expert, float32 in specs]
    return [
        Shard(tensors[tensor], Box(tuple(start), tuple(stop)), names[name], tuple(local_start), chunk)
        for tensor, start, stop, name, local_start, chunk in blocks
    ]
