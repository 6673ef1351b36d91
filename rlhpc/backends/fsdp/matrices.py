"""Matrices inside a model's parameters, and computation on whole ones.

A matrix is an expert of a stack, or one of the joined weights of attention and MLPs. HuggingFace's files store most of
them apart. What they store joined is divided here: queries, keys and values by the config's numbers of heads, gate and
up projection in halves.

Each matrix is gathered on one rank of a copy of the weights, and its result returned in shards. The owners follow from
shapes and number of shards alone. In every layout a result is that of the same whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from rlhpc.backends.fsdp.sharded_model import ShardedModel
from rlhpc.backends.fsdp.stored import StoredPiece, StoredWeight, held_rows

Rows = tuple[range, ...]
_QKV_BLOCKS = ("qkv_proj", "Wqkv", "c_attn")  # all queries, all keys, all values
_QKV_GROUPS = ("query_key_value",)  # for each head of keys: its queries, its keys, its values
_OTHERWISE_GROUPS = {"minimax": "qkv_proj", "gpt_bigcode": "c_attn"}  # the second unless all heads share one key
_GATE_UP = ("gate_up_proj", "input_linear")
ROUND = 1 << 24  # elements of the matrices that a rank gathers at once, unless a single one has more


@dataclass(frozen=True)
class Matrix:
    """``rows``, ascending, and ``columns`` of a parameter, or of tensor ``index`` of a stack.

    ``size``: the parameter's first dimension, over which it is sharded.
    """

    parameter: str
    size: int
    index: int | None
    rows: Rows
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.rows)), len(self.columns)

    def held(self, shards: int, index: int) -> Rows:
        """Rows of the matrix that a shard of the parameter contains, in the parameter's coordinates."""
        held = held_rows(self.size, shards, index)
        if self.index is not None:
            return self.rows if self.index in held else ()
        cut = (range(max(r.start, held.start), min(r.stop, held.stop)) for r in self.rows)
        return tuple(rows for rows in cut if rows)

    def numel_held(self, shards: int, index: int) -> int:
        return sum(map(len, self.held(shards, index))) * len(self.columns)

    def holding(self, shards: int) -> range:
        """Shards of the parameter that may contain some of the matrix: no others do."""
        each = -(-self.size // shards)
        first, last = (
            (self.index, self.index) if self.index is not None else (self.rows[0].start, self.rows[-1].stop - 1)
        )
        return range(first // each, last // each + 1)


def is_vector(weights: list[StoredWeight]) -> bool:
    """True if a parameter consists of vectors only: those of HuggingFace's files, or a stack of experts' biases."""
    return all(len(w.tensor.shape) < 2 or w.tensor.name.endswith("bias") for w in weights)


def find_matrices(model: ShardedModel, weights: dict[str, list[StoredWeight]]) -> dict[str, tuple[Matrix, ...]]:
    """The matrices of each parameter that has nothing else, but of embeddings, head and routers.

    ``weights``: the stored weights in each parameter.
    """
    others = _tables_and_routers(model)
    found = {}
    for name, stored in weights.items():
        if name not in others and not is_vector(stored):
            matrices = [_matrices(model, weight, piece) for weight in stored for piece in weight.pieces]
            if all(matrices):
                found[name] = tuple(m for some in matrices for m in some if m.parameter == name)
    return found


def _tables_and_routers(model: ShardedModel) -> set[str]:
    """Names of the parameters of embeddings, head and routers."""
    head = {id(parameter) for parameter in model.head.parameters()}
    found = {name for name, parameter in model.module.named_parameters() if id(parameter) in head}
    for path, module in model.module.named_modules():
        if isinstance(module, nn.Embedding) or "Router" in type(module).__name__ or _is_gate(model, path):
            found |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return found


def _is_gate(model: ShardedModel, path: str) -> bool:
    """True if the module is a router that is no class of its own: ``gate`` beside ``experts``."""
    above, _, leaf = path.rpartition(".")
    return leaf in ("gate", "router") and hasattr(model.module.get_submodule(above), "experts")


def _matrices(model: ShardedModel, weight: StoredWeight, piece: StoredPiece) -> list[Matrix]:
    """The matrices of a piece; none if it is something else, such as a convolution's kernel."""
    owner = model.module.get_submodule(piece.parameter.rpartition(".")[0])
    assert piece.rows is not None, "a buffer has no gradient"
    stack = len(piece.start) == 3
    ranges = [range(first, first + size) for first, size in zip(piece.start[-2:], piece.box.shape[-2:], strict=False)]
    if len(ranges) < 2 or len(piece.start) > 3 or (stack and "Experts" not in type(owner).__name__):
        return []
    rows, columns = ranges
    if min(len(rows), len(columns)) < 2:
        return []
    count = piece.box.shape[0] if len(piece.box.shape) == 3 else 1
    indices = [piece.start[0] + i for i in range(count)] if stack else [None]
    leaf = weight.tensor.name.removesuffix(".weight").rpartition(".")[2]
    parts = list(_parts(model.module.config.get_text_config(), owner, leaf, rows, columns))
    return [Matrix(piece.parameter, piece.rows, index, *part) for index in indices for part in parts]


def _parts(
    config: PretrainedConfig, owner: nn.Module, leaf: str, rows: range, columns: range
) -> Iterator[tuple[Rows, range]]:
    """Rows and columns of the matrices that are joined in one, which is named ``leaf``."""
    transposed = isinstance(owner, Conv1D) or getattr(owner, "is_transposed", False)
    outputs = columns if transposed else rows
    for part in _outputs(config, owner, leaf, outputs):
        if not transposed:
            yield part, columns
        else:
            (only,) = part  # no model joins groups of heads in columns
            yield (rows,), only


def _outputs(config: PretrainedConfig, owner: nn.Module, leaf: str, outputs: range) -> list[Rows]:
    """Outputs of each joined projection."""
    if leaf in (*_QKV_BLOCKS, *_QKV_GROUPS):
        return _qkv(config, leaf, outputs) or [(outputs,)]
    if leaf in _GATE_UP and len(outputs) % 2 == 0 and getattr(owner, "has_gate", True):
        half = len(outputs) // 2
        if getattr(owner, "is_concatenated", True):
            return [(outputs[:half],), (outputs[half:],)]
        return [(outputs[::2],), (outputs[1::2],)]
    return [(outputs,)]


def _qkv(config: Any, leaf: str, outputs: range) -> list[Rows]:
    """Outputs of queries, keys and values; none if the heads do not add up to all outputs."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys, rest = divmod(len(outputs) - heads * dim, 2 * dim)  # heads of keys
    if rest or keys < 1 or heads % keys:
        return []
    groups = leaf in _QKV_GROUPS or _OTHERWISE_GROUPS.get(config.model_type) == leaf
    count = keys if groups else 1
    found: tuple[list[range], ...] = ([], [], [])
    at = 0
    for _ in range(count):
        for part, size in zip(found, (heads // count, keys // count, keys // count), strict=True):
            part.append(outputs[at : at + size * dim])
            at += size * dim
    return [tuple(part) for part in found]


def assign(matrices: Iterable[Matrix], shards: int) -> list[list[Matrix]]:
    """The matrices of each owner, largest first, balanced by their cost.

    One that a rank holds whole stays there, unless that would give the rank more than its share.
    """
    ordered = sorted(matrices, key=_cost, reverse=True)
    share = sum(map(_cost, ordered)) / shards
    loads = [0] * shards
    owned: list[list[Matrix]] = [[] for _ in range(shards)]
    for matrix in ordered:
        owner, holding = loads.index(min(loads)), matrix.holding(shards)
        if len(holding) == 1 and loads[holding[0]] + _cost(matrix) <= max(share, loads[owner] + _cost(matrix)):
            owner = holding[0]
        loads[owner] += _cost(matrix)
        owned[owner].append(matrix)
    return owned


def _cost(matrix: Matrix) -> int:
    """Multiplications of a Newton-Schulz step."""
    short, long = sorted(matrix.shape)
    return 2 * short * short * long + short**3


def _batches(matrices: Sequence[Matrix], most: int) -> list[list[Matrix]]:
    """Consecutive matrices of at most ``most`` elements together, or single ones."""
    batches: list[list[Matrix]] = []
    held = most
    for matrix in matrices:
        rows, columns = matrix.shape
        held += rows * columns
        if held > most:
            batches.append([])
            held = rows * columns
        batches[-1].append(matrix)
    return batches


@dataclass(frozen=True)
class _Round:
    """Matrices in flight at once: ``given`` by this rank, in the order of their owners, and its own, ``owned``.

    Elements of this rank's part of each given one, and of every rank's part of each owned one.
    """

    given: list[list[Matrix]]
    owned: list[Matrix]
    given_sizes: list[list[int]]
    owned_sizes: list[list[int]]


class MatrixOwners:
    """Runs a function on every matrix of this rank's copy of the weights. ``device`` computes and communicates."""

    def __init__(
        self, matrices: Iterable[Matrix], group: dist.ProcessGroup, device: torch.device, most: int = ROUND
    ) -> None:
        self._group, self._device = group, device
        shards, index = group.size(), group.rank()
        self.owned = assign(matrices, shards)
        queues = [_batches(some, most) for some in self.owned]
        self._rounds = []
        for number in range(max(map(len, queues))):
            given = [queue[number] if number < len(queue) else [] for queue in queues]
            given_sizes = [[matrix.numel_held(shards, index) for matrix in some] for some in given]
            owned_sizes = [[matrix.numel_held(shards, source) for matrix in given[index]] for source in range(shards)]
            self._rounds.append(_Round(given, given[index], given_sizes, owned_sizes))

    def run(
        self,
        read: Callable[[Matrix], Float[Tensor, " held"]],
        compute: Callable[[Float[Tensor, "m n"]], Float[Tensor, "m n"]],
        write: Callable[[Matrix, Float[Tensor, " held"]], None],
    ) -> None:
        """Passes each matrix whole to ``compute``, from what each rank ``read``s of it, and this rank's part of the
        result to ``write``. Collective over the ranks of a copy."""
        for now in self._rounds:
            sent = torch.cat([read(matrix).to(self._device) for some in now.given for matrix in some])
            arrived = self._exchange(sent, now.given_sizes, now.owned_sizes)
            parts = arrived.split([size for sizes in now.owned_sizes for size in sizes])
            for number, matrix in enumerate(now.owned):
                _compute(matrix, parts[number :: len(now.owned)], compute)
            results = self._exchange(arrived, now.owned_sizes, now.given_sizes)
            blocks = iter(results.split([size for sizes in now.given_sizes for size in sizes]))
            for matrix in (matrix for some in now.given for matrix in some):
                write(matrix, next(blocks))

    def _exchange(self, flat: Tensor, sent: list[list[int]], received: list[list[int]]) -> Tensor:
        """Sends each rank its elements of ``flat``; returns those from all ranks, in their order."""
        if self._group.size() == 1:
            return flat
        sizes = [sum(some) for some in received]
        arrived = flat.new_empty(sum(sizes))
        dist.all_to_all_single(arrived, flat, sizes, [sum(some) for some in sent], group=self._group)
        return arrived


def _compute(matrix: Matrix, parts: Sequence[Tensor], compute: Callable[[Tensor], Tensor]) -> None:
    """Replaces a matrix, of which each rank has sent some rows, by the result."""
    rows = [part.view(-1, len(matrix.columns)) for part in parts]
    results = compute(torch.cat(rows)).split([len(part) for part in rows])
    for part, result in zip(rows, results, strict=True):
        part.copy_(result)
