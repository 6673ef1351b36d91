"""Loads and reads a sharded model's weights by HuggingFace's names, never whole but one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhpc.backends.fsdp.sharded_model import SCORE, ShardedModel, local_part, persistent_buffers
from rlhpc.backends.fsdp.stored import ModelWeight, StoredWeight, rank_shards, shards_holding, stored_weights
from rlhpc.checkpoint.formats.safetensors_reader import SafetensorsFolder
from rlhpc.core.errors import UserError
from rlhpc.sharding.mesh_sizes import held_rows
from rlhpc.sharding.shards import Shard, blocks_of

_VALUE_HEAD = f"{SCORE}.weight"
_READABLE = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class ReadBytes:
    """Bytes that a rank has read from a folder: all, and the largest block of a tensor, which it held beside its
    weights."""

    total: int
    largest_block: int


class WeightShards:
    """Parameters and persistent buffers of this rank as shards in HuggingFace's names."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        sources = _sources(model)
        self.shapes = {name: source.shape for name, source in sources.items()}  # of parameters and buffers, whole
        self.weights = stored_weights(model.module, sources)
        self.shards = rank_shards(self.weights, model.meshes.sizes, dist.get_rank())
        # Modules, not parameters: while weights are gathered, a module has other parameters.
        self._owners = {name: model.module.get_submodule(name.rpartition(".")[0]) for name in sources}
        self._sharded = {name for name, source in sources.items() if source.sharded}
        index = model.meshes.sizes.shard_index(dist.get_rank())
        for name in self._sharded:
            rows = held_rows(sources[name].shape[0], model.meshes.sizes.shards, index)
            assert self.local(name).shape[0] == len(rows), f"rows of {name} differ from its shard's"

    def is_sharded(self, name: str) -> bool:
        """True if ranks have parts of the tensor, by rows; else each has it whole."""
        return name in self._sharded

    def local(self, name: str) -> Tensor:
        """This rank's live part of a parameter or buffer. Weights must not be gathered: ``ShardedModel.reshard``."""
        owner, leaf = self._owners[name], name.rpartition(".")[2]
        tensor = getattr(owner, leaf).detach()
        # Not resharded here: a rank that reads nothing would keep its weights, and the next gather would hang.
        assert name not in self._sharded or isinstance(tensor, DTensor), f"{name} is gathered: reshard() first"
        return local_part(tensor)

    def view(self, shard: Shard) -> Tensor:
        """The live block of the shard's parameter, with the tensor's own number of dimensions."""
        return self.local(shard.local_name)[shard.local_box.slices].view(shard.box.shape)

    @torch.no_grad()
    def load(self, folder: Path) -> ReadBytes:
        """Reads this rank's blocks of a HuggingFace folder; zeroes a value head that the folder lacks. Raises UserError
        for a tensor that is missing, of another shape, or quantized."""
        self._model.reshard()
        total = largest = 0
        with SafetensorsFolder(folder) as files:
            for shard in self.shards:
                name = shard.tensor.name
                if name == _VALUE_HEAD and name not in files:
                    self.view(shard).zero_()
                    continue
                block = files.read(name, shard.tensor.shape, shard.box.slices)
                if block.dtype not in _READABLE:
                    raise UserError(
                        f"tensor {name!r} is {str(block.dtype).removeprefix('torch.')}",
                        where=str(folder),
                        remedy="convert the weights to bfloat16 first",
                    )
                self.view(shard).copy_(block)
                total, largest = total + block.nbytes, max(largest, block.nbytes)
        return ReadBytes(total, largest)

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this rank's blocks of whole tensors, by HuggingFace's names; ignores tensors that the model lacks.
        Collective over the ranks of a copy."""
        self._model.reshard()
        for shard, block in blocks_of(self.shards, tensors):
            self.view(shard).copy_(block)

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, by HuggingFace's name, on every rank; in ``dtype`` or that of the shards, float32 weights
        as they are. Collective over the ranks of a copy."""
        self._model.reshard()
        for weight in self.weights:
            yield weight.tensor.name, self._whole(weight, None if weight.tensor.float32 else dtype)

    def _whole(self, weight: StoredWeight, dtype: torch.dtype | None) -> Tensor:
        sizes = self._model.meshes.sizes
        held = {index: rank_shards([weight], sizes, index) for index in shards_holding(weight, sizes)}
        held_as = self.local(weight.pieces[0].parameter).dtype
        full = torch.empty(weight.tensor.shape, dtype=dtype or held_as, device=self._model.device)
        for index, flat in self._gather(weight, held, full).items():
            at = 0
            for shard in held[index]:
                full[shard.box.slices] = flat[at : at + shard.box.volume].view(shard.box.shape)
                at += shard.box.volume
        return full

    def _gather(self, weight: StoredWeight, held: dict[int, list[Shard]], reference: Tensor) -> dict[int, Tensor]:
        """Blocks of each rank of the copy that holds any, in one dimension; from a single rank by a broadcast."""
        group = self._model.meshes.copy_group
        me = group.rank()
        flat = reference.new_zeros(max(sum(shard.box.volume for shard in shards) for shards in held.values()))
        at = 0
        for shard in held.get(me, ()):
            flat[at : at + shard.box.volume].view(shard.box.shape).copy_(self.view(shard))
            at += shard.box.volume
        if all(piece.rows is None for piece in weight.pieces):
            return {me: flat}  # every rank holds it whole
        if len(held) == 1:
            (source,) = held
            dist.broadcast(flat, group=group, group_src=source)
            return {source: flat}
        parts = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(parts, flat, group=group)
        return {index: parts[index] for index in held}


def _sources(model: ShardedModel) -> dict[str, ModelWeight]:
    """Parameters, tied ones once, and buffers that files contain."""
    model.reshard()
    found = {}
    for name, parameter in model.module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        found[name] = ModelWeight(tuple(parameter.shape), sharded=True)
    for name, buffer in persistent_buffers(model.module).items():
        found[name] = ModelWeight(tuple(buffer.shape), sharded=False, float32=buffer.dtype is torch.float32)
    return found
