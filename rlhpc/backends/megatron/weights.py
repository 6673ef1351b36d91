"""Loads and reads the weights of this rank's modules by shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlhpc.checkpoint.formats.safetensors_reader import SafetensorsFolder, TorchDistFolder
from rlhpc.checkpoint.formats.torch_dist_metadata import is_torch_dist
from rlhpc.checkpoint.formats.weight_table import refuse_other_backend
from rlhpc.core.rank import RankInfo
from rlhpc.models import ModelShape
from rlhpc.parallel.compat import device
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Shard, TensorSpec, blocks_of, megatron_shards, model_tensors

_OUTPUT = "output_layer.weight"
_PADDED = {"embedding.word_embeddings.weight", _OUTPUT}
_VALUE_HEAD = "score.weight"
_EXPERT_BIAS = "mlp.router.expert_bias"  # the only weight that is not a parameter; always float32

ShardsByTensor = dict[str, list[Shard]]


class ShardedWeights:
    """Parameters of this rank's modules, and the routers' biases, as shards."""

    def __init__(self, shape: ModelShape, layout: ParallelLayout, info: RankInfo, chunks: list[GPTModel]) -> None:
        self.shape, self._layout = shape, layout
        self.shards = megatron_shards(shape, layout, info.rank)
        self._params = [_weights_of(chunk) for chunk in chunks]
        self.dtype = next(chunks[0].parameters()).dtype
        self._members: dict[dist.ProcessGroup, list[ShardsByTensor]] = {}
        held = {(shard.chunk, shard.local_name) for shard in self.shards}
        present = {(i, name) for i, params in enumerate(self._params) for name in params}
        assert held == present, f"shards and model differ: {sorted(held ^ present)[:4]}"

    def parameter(self, shard: Shard) -> Tensor:
        """Parameter that contains the shard."""
        return self._params[shard.chunk][shard.local_name]

    def parameters(self) -> Iterator[Tensor]:
        """Each parameter once, and the routers' biases."""
        for params in self._params:
            yield from params.values()

    def view(self, shard: Shard) -> Tensor:
        """The live block of the shard's parameter."""
        return block_of(self.parameter(shard).data, shard)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Reads this rank's byte ranges of a HuggingFace folder or a torch_dist checkpoint; zeroes rows that pad the
        vocabulary, and a value head that the folder lacks."""
        refuse_other_backend(folder, "megatron")
        for params in self._params:
            for name in params.keys() & _PADDED:
                params[name].data.zero_()
        with TorchDistFolder(folder, self.shape) if is_torch_dist(folder) else SafetensorsFolder(folder) as files:
            for shard in self.shards:
                if shard.tensor.name == _VALUE_HEAD and shard.tensor.name not in files:
                    self.view(shard).zero_()
                    continue
                files.read_into(self.view(shard), shard.tensor.name, shard.tensor.shape, shard.box.slices)

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies this rank's blocks of whole tensors, by HuggingFace's names; ignores tensors that the model lacks."""
        for shard, block in blocks_of(self.shards, tensors):
            self.view(shard).copy_(block)

    @torch.no_grad()
    def full_tensors(
        self, view: Callable[[Shard], Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model whole, on every rank, gathered over the ranks of one copy of the model.

        ``view`` returns the block of a shard in ``dtype``, by default the weight itself. Collective over all ranks.
        """
        view, dtype = view or self.view, dtype or self.dtype
        for tensor in model_tensors(self.shape):
            group = _copy_group(tensor)
            members = self._shards_by_member(group)
            mine = members[group.rank()].get(tensor.name, [])
            if all(_holds_whole(tensor, shards) for shards in members):
                yield tensor.name, view(mine[0])
                continue
            size = max(sum(prod(shard.box.shape) for shard in shards.get(tensor.name, [])) for shards in members)
            holder = next(shard for shards in members for shard in shards.get(tensor.name, []))
            is_bias = holder.local_name.endswith(_EXPERT_BIAS)
            flat = _flatten(map(view, mine), size, torch.float32 if is_bias else dtype)
            parts = [torch.empty_like(flat) for _ in members]
            dist.all_gather(parts, flat, group=group)
            yield tensor.name, _assemble(tensor, parts, members)

    def _shards_by_member(self, group: dist.ProcessGroup) -> list[ShardsByTensor]:
        """Shards by tensor for each rank of the group, without a second copy of tied embeddings."""
        if group not in self._members:
            members: list[ShardsByTensor] = []
            for rank in dist.get_process_group_ranks(group):
                shards: ShardsByTensor = {}
                for shard in megatron_shards(self.shape, self._layout, rank):
                    if not (shard.local_name == _OUTPUT and self.shape.tied_embeddings):
                        shards.setdefault(shard.tensor.name, []).append(shard)
                members.append(shards)
            self._members[group] = members
        return self._members[group]


def block_of(parameter: Tensor, shard: Shard) -> Tensor:
    """Part of a parameter (or of its gradient) that contains ``shard``, with the tensor's own number of dims."""
    return parameter[shard.local_box.slices].view(shard.box.shape)


def _weights_of(chunk: GPTModel) -> dict[str, Tensor]:
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(_EXPERT_BIAS)}
    return {**dict(chunk.named_parameters()), **biases}


def _copy_group(tensor: TensorSpec) -> dist.ProcessGroup:
    """Ranks that hold one copy of the model together; experts are sharded over other axes than the rest."""
    if tensor.expert is None:
        return parallel_state.get_model_parallel_group()
    return parallel_state.get_expert_tensor_model_pipeline_parallel_group()


def _holds_whole(tensor: TensorSpec, shards: ShardsByTensor) -> bool:
    mine = shards.get(tensor.name, [])
    return len(mine) == 1 and mine[0].box.shape == tensor.shape


def _flatten(blocks: Iterable[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """This rank's blocks of a tensor, concatenated and padded to the size of the largest rank's."""
    flat = torch.empty(size, dtype=dtype, device=device())
    start = 0
    for block in blocks:
        flat[start : start + block.numel()].view(block.shape).copy_(block)
        start += block.numel()
    return flat


def _assemble(tensor: TensorSpec, parts: list[Tensor], members: list[ShardsByTensor]) -> Tensor:
    """Assembles the whole tensor from every member's flat blocks."""
    full: Tensor | None = None
    for flat, shards in zip(parts, members, strict=True):
        start = 0
        for shard in shards.get(tensor.name, []):
            size = prod(shard.box.shape)
            block = flat[start : start + size].view(shard.box.shape)
            if shard.box.shape == tensor.shape:
                return block
            if full is None:
                full = flat.new_empty(tensor.shape)
            full[shard.box.slices] = block
            start += size
    assert full is not None, f"no rank holds {tensor.name}"
    return full
