"""Bytes of a model's weights, gradients and optimizer state on a rank, with the padding of Megatron's buffers.

As ``_ParamAndGradBuffer`` (megatron/core/distributed/param_and_grad_buffer.py:586, 0.16.1) lays them out and
``DistributedOptimizer`` (optimizer/distrib_optimizer.py:207) splits them over the data-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod

from rlhpc.config.training import MemorySection
from rlhpc.models import ModelShape, find_family
from rlhpc.models.tables import Cut, Row, Where
from rlhpc.sharding.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout
from rlhpc.sharding.shards import padded_vocab

ITEMSIZE = {"float32": 4, "bfloat16": 2}
_FLOAT32 = 4
_PARAM_ALIGNMENT = 64  # elements (param_and_grad_buffer.py:665)
_BUCKET_ALIGNMENT = 128  # elements (param_and_grad_buffer.py:654)
_BUCKET = 40_000_000  # elements at least, and ...
STAGED = 1 << 24  # elements of a piece of the CPU's optimizer; two are in flight between device and CPU
_MODULES = (
    "input_layernorm",
    "self_attention",
    "pre_mlp_layernorm",
    "mlp",
)  # of a layer, in the order of their creation
_BUCKET_OF_RANK = 1_000_000  # ... so many for each data-parallel rank (distributed_data_parallel.py:67)


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of a rank's module; ``shared`` is a tied embedding of several stages, in a bucket of its own."""

    name: str
    numel: int
    vector: bool = False  # no weight decay, and so in the optimizer's second group
    expert: bool = False
    shared: bool = False


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one model on one rank. ``cpu``: of AdamW in CPU memory (optimizer_offload_fraction), or of weights and
    optimizer (cpu_offload); ``staging``: of the buffers there for gradients and new weights."""

    parameters: int
    gradients: int = 0
    master: int = 0  # float32 copies of half-precision weights, on the device
    moments: int = 0  # on the device
    cpu: int = 0
    staging: int = 0

    @property
    def optimizer(self) -> int:
        """Master weights and moments on the device."""
        return self.master + self.moments


def rank_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> list[list[LocalParameter]]:
    """Returns the parameters of a rank of a pipeline stage by chunk, in the order of ``named_parameters``.

    They are the same on ranks that differ along other axes.
    """
    chunks: list[list[LocalParameter]] = [[] for _ in range(layout.vpp or 1)]
    rows = find_family(shape.family).table(shape)
    expert_layers = set(shape.experts.layers) if shape.experts else set()
    kinds = {kind: _layer(shape, layout, rows, kind) for kind in (Where.DENSE_LAYER, Where.EXPERT_LAYER)}
    tied = shape.tied_embeddings and layout.pp > 1
    if stage == 0:
        chunks[0] += _held(shape, layout, rows, Where.FIRST, shared=tied)
    for layer, (owner, chunk, _) in enumerate(layout.layer_places(shape.num_layers)):
        if owner == stage:
            chunks[chunk] += kinds[Where.EXPERT_LAYER if layer in expert_layers else Where.DENSE_LAYER]
    if stage == layout.pp - 1:
        chunks[-1] += _held(shape, layout, rows, Where.LAST)
        if tied:
            (embedding,) = _held(shape, layout, rows, Where.FIRST, shared=True)
            chunks[-1].append(replace(embedding, name="output_layer.weight"))
    return chunks


def state_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    *,
    optimizer_offload_fraction: float | None = 0.0,
    bucket: int | None = None,
) -> StateBytes:
    """Returns the bytes that one rank allocates for a model.

    ``optimizer_offload_fraction`` None: the model is frozen and has only weights. ``bucket``: elements that close a
    bucket on the first stage (``default_bucket``); None: one bucket for all.
    """
    coord = coordinates(layout, rank)
    chunks = rank_parameters(shape, layout, coord["pp"])
    if optimizer_offload_fraction is None:
        return StateBytes(ITEMSIZE[dtype] * sum(parameter.numel for chunk in chunks for parameter in chunk))
    numel, on_device, on_cpu, staged = 0, 0, 0, 0
    for expert, ranks, index in (
        (False, layout.dp * layout.cp, coord["dp"] * layout.cp + coord["cp"]),
        (True, layout.edp, coord["edp"]),
    ):
        owned: list[tuple[LocalParameter, int]] = []
        for number, chunk in enumerate(chunks):
            closes = bucket if number == coord["pp"] == 0 else None
            buffer = lay_out([p for p in chunk if p.expert == expert], ranks, closes)
            numel += buffer.numel
            owned += buffer.owned(ranks, index)
        mine, away = _share(owned, optimizer_offload_fraction)
        on_device, on_cpu = on_device + sum(mine), on_cpu + sum(away)
        staged += 2 * min(STAGED, max(away, default=0))
    master = 0 if dtype == "float32" else _FLOAT32
    return StateBytes(
        parameters=ITEMSIZE[dtype] * numel,
        gradients=_FLOAT32 * numel,
        master=master * on_device,
        moments=2 * _FLOAT32 * on_device,
        cpu=(master + 2 * _FLOAT32) * on_cpu,
        staging=(_FLOAT32 + ITEMSIZE[dtype]) * staged,
    )


def coordinates(layout: ParallelLayout, rank: int) -> dict[str, int]:
    """Returns the rank's ``layout.coord`` without computing all ranks': a search tries thousands of layouts."""
    coord = {}
    for order in (DENSE_AXES, EXPERT_AXES):
        rest = rank
        for axis in order:
            rest, coord[axis] = divmod(rest, layout.size(axis))
    return coord


def default_bucket(layout: ParallelLayout) -> int:
    """Returns the elements that close a bucket (distributed_data_parallel.py:65)."""
    return max(_BUCKET, _BUCKET_OF_RANK * layout.dp)


@dataclass(frozen=True)
class Buffer:
    """Ranges (start, stop) of parameters in a contiguous buffer, and of its buckets."""

    parameters: tuple[LocalParameter, ...]
    places: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def largest_bucket(self) -> int:
        return max((stop - start for start, stop in self.buckets), default=0)

    def owned(self, ranks: int, index: int) -> list[tuple[LocalParameter, int]]:
        """Returns the parameters with elements in the rank's part of their bucket, and the number of these."""
        found, at = [], 0
        for start, stop in self.buckets:
            part = (stop - start) // ranks
            begin, end = start + index * part, start + (index + 1) * part
            while at < len(self.places) and self.places[at][1] <= stop:
                first, last = self.places[at]
                size = min(last, end) - max(first, begin)
                if size > 0:
                    found.append((self.parameters[at], size))
                at += 1
        return found


def lay_out(parameters: Sequence[LocalParameter], ranks: int, bucket: int | None = None) -> Buffer:
    """Returns the buffer of a chunk's parameters, last first; ``bucket`` elements close a bucket, None: one for all."""
    divisor = lcm(ranks, _BUCKET_ALIGNMENT)
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    at = begin = 0
    open_ = False
    for parameter in reversed(parameters):
        at = _up(at, _PARAM_ALIGNMENT)
        if parameter.shared and open_:
            buckets.append((begin, _up(at, divisor)))
            at = begin = buckets[-1][1]
        places.append((at, at + parameter.numel))
        at, open_ = at + parameter.numel, True
        if parameter.shared or (bucket is not None and at - begin >= bucket):
            buckets.append((begin, _up(at, divisor)))
            at = begin = buckets[-1][1]
            open_ = False
    if open_:
        buckets.append((begin, _up(at, divisor)))
    return Buffer(tuple(reversed(parameters)), tuple(places), tuple(buckets))


def _share(
    owned: Sequence[tuple[LocalParameter, int]], optimizer_offload_fraction: float
) -> tuple[list[int], list[int]]:
    """Returns sizes of the parameters with state on the device and on the CPU, as ``leading_share`` of adamw.py splits
    them: vectors last."""
    sizes = [size for parameter, size in owned if not parameter.vector]
    sizes += [size for parameter, size in owned if parameter.vector]
    total, held, count = sum(sizes), 0, 0
    while count < len(sizes) and held < optimizer_offload_fraction * total:
        held += sizes[count]
        count += 1
    return sizes[count:], sizes[:count]


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


def _layer(shape: ModelShape, layout: ParallelLayout, rows: Sequence[Row], kind: Where) -> list[LocalParameter]:
    """Returns the parameters of a dense or expert layer in the order of its modules."""
    found = _held(shape, layout, rows, Where.LAYER, kind)
    return sorted(found, key=lambda parameter: _place_in_layer(shape, parameter.name))


def _place_in_layer(shape: ModelShape, name: str) -> tuple[int, int]:
    """Attention.__init__ creates linear_proj before SelfAttention creates the others (transformer/attention.py:349)."""
    module, _, rest = name.removeprefix("decoder.layers.{layer}.").partition(".")
    first = rest.startswith("linear_proj.") and shape.latent is None
    return _MODULES.index(module), 0 if first else 1


def _held(
    shape: ModelShape, layout: ParallelLayout, rows: Sequence[Row], *where: Where, shared: bool = False
) -> list[LocalParameter]:
    """Returns a rank's parameters of these places, in the table's order."""
    found: dict[str, LocalParameter] = {}
    for row in rows:
        if row.where in where and not row.float32:  # those are buffers
            before = found[row.local_name].numel if row.local_name in found else 0
            numel = before + _numel(shape, layout, row)
            found[row.local_name] = LocalParameter(
                row.local_name, numel, len(row.shape) == 1, row.of_each_expert, shared
            )
    return list(found.values())


def _numel(shape: ModelShape, layout: ParallelLayout, row: Row) -> int:
    if row.cut is Cut.WHOLE:
        return prod(row.shape)
    if row.cut is Cut.VOCAB:
        return padded_vocab(row.shape[0], layout.tp) // layout.tp * prod(row.shape[1:])
    if row.of_each_expert:
        assert shape.experts is not None, "a row for each expert of a model that has none"
        return shape.experts.num_experts // layout.ep * prod(row.shape) // layout.etp
    return prod(row.shape) // layout.tp


@dataclass(frozen=True)
class Tokens:
    """Tokens of a microbatch on a rank, in training and in forward passes, and the microbatches of an update."""

    trained: int
    passed: int
    microbatches: int


class RankModel(ABC):
    """One model on one rank. ``state``: its bytes between updates, before any offload."""

    name: str
    state: StateBytes
    tokens: Tokens
    trained: bool

    @property
    @abstractmethod
    def layout(self) -> ParallelLayout:
        """Layout of the ranks that share a batch."""

    @property
    @abstractmethod
    def memory(self) -> MemorySection:
        """The model's settings."""

    @property
    @abstractmethod
    def update_parts(self) -> Mapping[str, int]:
        """Bytes at the peak of an update's passes, beside the state in it."""

    @property
    @abstractmethod
    def pass_parts(self) -> Mapping[str, int]:
        """Peak bytes of a forward pass without gradients, beside the state."""

    @property
    @abstractmethod
    def saved_on_cpu(self) -> int:
        """Bytes of the copies in CPU memory that a checkpoint is written from."""

    @property
    @abstractmethod
    def activations_on_cpu(self) -> int:
        """Bytes of activations that wait in CPU memory at the peak of an update."""

    @property
    def weights(self) -> int:
        """Bytes of the weights, wherever they are."""
        return self.state.parameters

    @property
    def updating_state(self) -> StateBytes:
        """Bytes in an update, with gradients."""
        return self.state

    @cached_property
    def idle_state(self) -> StateBytes:
        """Bytes left on the GPU after offload as configured."""
        return self.remaining(keep_weights=False)

    def remaining(self, *, keep_weights: bool) -> StateBytes:
        """Returns what offload leaves, in the back end's order: gradients, optimizer, weights, in whole buffers."""
        section, state = self.memory.offload, self.state
        selected = {
            "gradients": self.trained and section.gradients,
            "optimizer": self.trained and section.optimizer,
            "parameters": section.parameters,
        }
        sizes = {"gradients": state.gradients, "optimizer": state.optimizer, "parameters": state.parameters}
        wanted = section.fraction * sum(size for kind, size in sizes.items() if selected[kind])
        gone = dict.fromkeys(sizes, 0)
        for kind, size in sizes.items():
            if selected[kind] and wanted > 0:
                gone[kind] = min(size, int(wanted)) if kind == "optimizer" else size
                wanted -= gone[kind]
        if keep_weights:
            gone["parameters"] = 0
        master = max(0, state.master - gone["optimizer"])
        return StateBytes(
            state.parameters - gone["parameters"],
            state.gradients - gone["gradients"],
            master,
            state.optimizer - gone["optimizer"] - master,
            state.cpu,
            state.staging,
        )
