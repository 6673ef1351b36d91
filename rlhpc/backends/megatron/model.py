"""Building Megatron's GPTModel for a shape and a layout, and the weights' way in and out by the plan's shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.megatron.layers import block_spec
from rlhpc.core.rank import RankInfo
from rlhpc.data.safetensors_files import SafetensorsFolder
from rlhpc.models import ModelShape
from rlhpc.plan.layout import ParallelLayout
from rlhpc.plan.shards import Shard, TensorSpec, megatron_shards, model_tensors, padded_vocab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, sequence_parallel: bool
) -> TransformerConfig:
    """Megatron's configuration of the model. Without Transformer Engine and apex, Megatron's own fusions are off."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights come from files. Initialisation still runs, as a no-op: it sets the tags that tell which parameters
        # are cut over tp, without which the gradient norm is wrong at tp > 1.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=False,
        variable_seq_lengths=layout.pp > 1,
        deallocate_pipeline_outputs=True,
        # Losses arrive divided by global denominators, so gradients are summed and never averaged again.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def build_chunks(shape: ModelShape, layout: ParallelLayout, config: TransformerConfig) -> list[GPTModel]:
    """This rank's modules, one for each virtual pipeline stage."""
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunks.append(
            GPTModel(
                config,
                block_spec(config, vp_stage),
                vocab_size=padded_vocab(shape.vocab_size, layout.tp),
                max_sequence_length=shape.max_positions,
                pre_process=first,
                post_process=last,
                parallel_output=True,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                position_embedding_type="none",  # the attention core rotates
                vp_stage=vp_stage,
            )
        )
    return chunks


def _leave(tensor: Tensor) -> Tensor:
    return tensor


class ShardedWeights:
    """The parameters of this rank's modules, seen as the plan's shards."""

    def __init__(self, shape: ModelShape, layout: ParallelLayout, info: RankInfo, chunks: list[GPTModel]) -> None:
        self._shape, self._layout, self._rank = shape, layout, info.rank
        self._shards = megatron_shards(shape, layout, info.rank)
        self._params = [dict(chunk.named_parameters()) for chunk in chunks]
        held = {(shard.chunk, shard.local_name) for shard in self._shards}
        present = {(i, name) for i, params in enumerate(self._params) for name in params}
        assert held == present, f"plan and model differ: {sorted(held ^ present)[:4]}"

    def view(self, shard: Shard) -> Tensor:
        """The live block of the parameter that holds the shard."""
        return self._params[shard.chunk][shard.local_name].data[shard.local_box.slices]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read this rank's byte ranges of a HuggingFace folder; rows that pad the vocabulary become zero."""
        for params in self._params:
            for name, param in params.items():
                if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    param.data.zero_()
        with SafetensorsFolder(folder) as files:
            for shard in self._shards:
                self.view(shard).copy_(files.read(shard.tensor.name, shard.tensor.shape, shard.box.slices))

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model whole, on every rank of the model-parallel group: gather, then assemble."""
        group = parallel_state.get_model_parallel_group()
        by_member = self._shards_by_member
        mine = by_member[group.rank()]
        for tensor in model_tensors(self._shape):
            sizes = [sum(self.view_size(s) for s in shards.get(tensor.name, [])) for shards in by_member]
            flat = self._flatten(mine.get(tensor.name, []), max(sizes), tensor)
            parts = [flat]
            if group.size() > 1:
                parts = [torch.empty_like(flat) for _ in by_member]
                dist.all_gather(parts, flat, group=group)
            yield tensor.name, _assemble(tensor, zip(parts, by_member, strict=True))

    @staticmethod
    def view_size(shard: Shard) -> int:
        size = 1
        for length in shard.box.shape:
            size *= length
        return size

    def _flatten(self, shards: list[Shard], size: int, tensor: TensorSpec) -> Tensor:
        """This rank's blocks of a tensor end to end, padded to the largest rank's."""
        like = next(iter(self._params[0].values()))
        if len(shards) == 1 and shards[0].box.shape == tensor.shape:
            return self.view(shards[0]).reshape(-1)
        flat = like.new_empty(size)
        start = 0
        for shard in shards:
            view = self.view(shard)
            flat[start : start + view.numel()].view(view.shape).copy_(view)
            start += view.numel()
        return flat

    @functools.cached_property
    def _shards_by_member(self) -> list[dict[str, list[Shard]]]:
        """For each rank of the model-parallel group, its shards by tensor."""
        members = []
        for rank in self._layout.group_of(self._rank, "tp", "pp"):
            shards: dict[str, list[Shard]] = {}
            for shard in megatron_shards(self._shape, self._layout, rank):
                if not (shard.local_name == "output_layer.weight" and self._shape.tied_embeddings):
                    shards.setdefault(shard.tensor.name, []).append(shard)
            members.append(shards)
        return members


def _assemble(tensor: TensorSpec, parts: Iterator[tuple[Tensor, dict[str, list[Shard]]]]) -> Tensor:
    """The whole tensor from every member's flat blocks."""
    full: Tensor | None = None
    for flat, shards in parts:
        start = 0
        for shard in shards.get(tensor.name, []):
            size = ShardedWeights.view_size(shard)
            block = flat[start : start + size].view(shard.box.shape)
            if shard.box.shape == tensor.shape:
                return block
            if full is None:
                full = flat.new_empty(tensor.shape)
            full[shard.box.slices] = block
            start += size
    assert full is not None, f"no rank holds {tensor.name}"
    return full
