"""Parameters of a model on FSDP2 by the modules that gather them, and their bytes on a rank.

As transformers has them in memory: the experts of a layer are two parameters, with one leading dimension more. Each
parameter is sharded along its first dimension, in ceil(rows / shards) rows each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape, TensorHeader, find_family
from rlhpc.models.tables import Row, Where
from rlhpc.plan.estimates.rank_memory import ITEMSIZE, StateBytes
from rlhpc.sharding.mesh_sizes import MeshSizes, held_rows

_FLOAT32 = 4
_QUANTIZED, _BLOCK, _CODES = 4096, 256, 256  # of torchao: elements from which on moments have 8 bits, of a block, codes
_HEADS = ("lm_head.weight", "score.weight")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """Shapes of the parameters that a module gathers together; ``count`` modules are alike."""

    shapes: tuple[Shape, ...]
    count: int = 1

    @property
    def numel(self) -> int:
        """Parameters of one of them."""
        return sum(map(prod, self.shapes))

    def shard(self, shards: int) -> int:
        """Returns the elements of one of them that each rank allocates."""
        return sum(-(-shape[0] // shards) * prod(shape[1:]) for shape in self.shapes)

    def held_parts(self, shards: int, index: int) -> list[tuple[Shape, int]]:
        """Returns the shapes of one of them with the elements that a rank holds, without padding."""
        return [(shape, len(held_rows(shape[0], shards, index)) * prod(shape[1:])) for shape in self.shapes]

    def gathered(self, shards: int) -> int:
        """Returns the elements of one of them on a rank that has gathered it, padding included."""
        return shards * self.shard(shards)


@dataclass(frozen=True)
class ParameterGroups:
    """Weights that root, embedding and head gather, and the layers by kind. A tied embedding is in the root."""

    layers: tuple[ParameterGroup, ...]
    root: ParameterGroup
    embedding: ParameterGroup = ParameterGroup(())
    head: ParameterGroup = ParameterGroup(())
    matrices: frozenset[Shape] = frozenset()  # of layers, that Muon orthogonalizes

    @property
    def all(self) -> tuple[ParameterGroup, ...]:
        return (*self.layers, self.root, self.embedding, self.head)

    @property
    def numel(self) -> int:
        return sum(group.count * group.numel for group in self.all)

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def tied(self) -> bool:
        return not self.embedding.shapes

    def shard(self, shards: int) -> int:
        return sum(group.count * group.shard(shards) for group in self.all)

    def gathered(self, shards: int) -> int:
        return shards * self.shard(shards)

    def largest_layer(self, shards: int) -> ParameterGroup:
        return max(self.layers, key=lambda group: group.gathered(shards))


# Of the last models by their files: a search asks for the same one with each layout.
_recent: deque[tuple[tuple[TensorHeader, ...], ParameterGroups]] = deque(maxlen=8)


def parameter_groups(model: ModelDescription) -> ParameterGroups:
    """Returns the groups of a known family from its table, of any other model from the headers of its files.

    Raises UserError without either.
    """
    if isinstance(model, ModelShape):
        return _with_matrices(_table_groups(model), model)
    if not model.tensors:
        raise UserError(
            f"no safetensors files of {model.architecture}, by whose headers memory is planned",
            where="model.path",
            remedy="download the weights, or set model.weights",
        )
    kept = next((groups for tensors, groups in _recent if tensors is model.tensors), None)
    if kept is None:
        kept = _with_matrices(_header_groups(model), model)
        _recent.append((model.tensors, kept))
    return kept


def _with_matrices(groups: ParameterGroups, model: ModelDescription) -> ParameterGroups:
    """Parameters of layers with two dimensions and stacks, but for routers."""
    router = (model.experts.num_experts, model.hidden_size) if model.experts else ()
    shapes = {shape for group in groups.layers for shape in group.shapes if len(shape) > 1}
    return replace(groups, matrices=frozenset(shapes - {router}))


def is_plannable(model: ModelDescription) -> bool:
    """True if the model's parameters are known."""
    return isinstance(model, ModelShape) or bool(model.tensors)


def _table_groups(shape: ModelShape) -> ParameterGroups:
    rows = [row for row in find_family(shape.family).table(shape) if not row.float32]  # those are buffers
    sparse = len(shape.experts.layers) if shape.experts else 0
    layers = []
    for kind, count in ((Where.DENSE_LAYER, shape.num_layers - sparse), (Where.EXPERT_LAYER, sparse)):
        if count:
            held = [row for row in rows if row.where in (Where.LAYER, kind)]
            layers.append(ParameterGroup(tuple(_stacked(shape, row) for row in held), count))
    first = [row.shape for row in rows if row.where is Where.FIRST]
    last = {row.hf_name: row.shape for row in rows if row.where is Where.LAST}
    norms = [size for name, size in last.items() if name not in _HEADS]
    return _groups(layers, norms, first, [size for name, size in last.items() if name in _HEADS])


def _stacked(shape: ModelShape, row: Row) -> Shape:
    if not row.of_each_expert:
        return row.shape
    assert shape.experts is not None, "a row for each expert of a model that has none"
    return (shape.experts.num_experts, *row.shape)


def _header_groups(model: ModelDescription) -> ParameterGroups:
    layers: dict[int, dict[str, Shape]] = {}
    outside: dict[str, list[Shape]] = {"head": [], "embedding": [], "root": []}
    for tensor in model.tensors:
        if tensor.of_other_inputs:
            continue
        if tensor.layer is not None:
            _add(layers.setdefault(tensor.layer, {}), tensor)
        else:
            kind = "head" if tensor.of_head else "embedding" if tensor.of_vocabulary else "root"
            outside[kind].append(tensor.shape)
    found: dict[tuple[Shape, ...], int] = {}
    for parameters in layers.values():
        key = tuple(sorted(parameters.values()))
        found[key] = found.get(key, 0) + 1
    kinds = [ParameterGroup(shapes, count) for shapes, count in found.items()]
    return _groups(kinds, outside["root"], outside["embedding"], outside["head"])


def _add(parameters: dict[str, Shape], tensor: TensorHeader) -> None:
    """Adds a tensor, an expert's to the stack of all."""
    if tensor.expert is None:
        parameters[tensor.name] = tensor.shape
        return
    stack = tensor.name.replace(f".experts.{tensor.expert}.", ".experts.*.")
    parameters[stack] = (parameters.get(stack, (0,))[0] + 1, *tensor.shape)


def _groups(
    layers: Sequence[ParameterGroup], root: Sequence[Shape], embedding: Sequence[Shape], head: Sequence[Shape]
) -> ParameterGroups:
    """Without a head of its own, the embedding is the head too, and the root gathers it."""
    if head:
        return ParameterGroups(
            tuple(layers), ParameterGroup(tuple(root)), ParameterGroup(tuple(embedding)), ParameterGroup(tuple(head))
        )
    return ParameterGroups(tuple(layers), ParameterGroup((*embedding, *root)))


def fsdp_state(
    groups: ParameterGroups, sizes: MeshSizes, rank: int, dtype: str, optimizer: str | None = "adamw"
) -> StateBytes:
    """Returns the bytes that a rank allocates for a model; shards of a trained one are its float32 master weights.

    ``optimizer``: its name, None for a frozen model; a user's own counts as AdamW.
    """
    allocated = groups.shard(sizes.shards)
    if optimizer is None:
        return StateBytes(ITEMSIZE[dtype] * allocated)
    index = sizes.shard_index(rank)
    moments = sum(
        group.count * _moments(numel, optimizer, matrix=group in groups.layers and shape in groups.matrices)
        for group in groups.all
        for shape, numel in group.held_parts(sizes.shards, index)
    )
    return StateBytes(_FLOAT32 * allocated, _FLOAT32 * allocated, moments=moments)


def pinned_gradients(groups: ParameterGroups, sizes: MeshSizes, rank: int) -> int:
    """Returns the bytes of a rank's gradients in CPU memory that PyTorch pins, in powers of two (aten/src/ATen/core/
    CachingHostAllocator.h)."""
    index = sizes.shard_index(rank)
    return sum(
        group.count * (1 << (_FLOAT32 * numel - 1).bit_length())
        for group in groups.all
        for _, numel in group.held_parts(sizes.shards, index)
        if numel
    )


def _moments(numel: int, optimizer: str, *, matrix: bool) -> int:
    """Returns the bytes of the optimizer's state of a parameter's ``numel`` elements on a rank."""
    if optimizer == "muon" and matrix:
        return _FLOAT32 * numel
    if optimizer == "adamw8bit" and numel >= _QUANTIZED and numel % _BLOCK == 0:  # torchao/optim/adam.py, _new_buffer
        return 2 * (numel + _FLOAT32 * numel // _BLOCK + _FLOAT32 * _CODES)
    return 2 * _FLOAT32 * numel


def gathered_bytes(groups: Sequence[ParameterGroup], shards: int, itemsize: int) -> int:
    """Returns the bytes of all of the groups' modules, gathered at once; those of one rank are in its shards."""
    return itemsize * sum(group.count * group.gathered(shards) for group in groups)
