"""What a packed batch is to every layer: sequence bounds and rotary angles, computed once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhpc.api import PackedBatch
from rlhpc.models import ModelShape, Rope

# Sequences are padded to the longest of their bucket on a CPU; a bucket takes lengths down to this share of it.
_BUCKET_FILL = 0.7
_SHORT = 32  # tokens: below it a call costs more than the padding it saves


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's record of a packed batch, with what our attention needs besides."""

    cos: Float32[Tensor, " T head_dim"] = None
    sin: Float32[Tensor, " T head_dim"] = None
    buckets: tuple[PaddedBucket, ...] = ()


@dataclass(frozen=True)
class PaddedBucket:
    """Sequences of like length laid in rows: ``rows[i, j]`` is the packed index of token j of sequence i.

    Beyond a sequence's end ``rows`` repeats its last token, which no token before it sees: attention is causal.
    ``cells`` are the true tokens in the flattened rows, ``tokens`` their packed indices.
    """

    rows: Tensor  # int64 [sequences, longest]
    cells: Tensor  # int64 [tokens]
    tokens: Tensor  # int64 [tokens]


def packed_params(batch: PackedBatch, rope: RotaryTable) -> PackedParams:
    """The layers' view of a batch."""
    lengths = batch.cu_seqlens.diff().tolist()
    cos, sin = rope(batch.positions)
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cos=cos,
        sin=sin,
        buckets=() if batch.tokens.is_cuda else padded_buckets(lengths),
    )


def padded_buckets(lengths: list[int]) -> tuple[PaddedBucket, ...]:
    """Group sequences of like length for one attention call each."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        longest = lengths[buckets[-1][0]] if buckets else 0
        if buckets and (lengths[i] >= _BUCKET_FILL * longest or longest <= _SHORT):
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return tuple(_bucket([starts[i] for i in members], [lengths[i] for i in members]) for members in buckets)


def _bucket(starts: list[int], lengths: list[int]) -> PaddedBucket:
    start, length = torch.tensor(starts)[:, None], torch.tensor(lengths)[:, None]
    column = torch.arange(max(lengths))[None]
    rows = start + torch.minimum(column, length - 1)
    cells = (column < length).flatten().nonzero()[:, 0]
    return PaddedBucket(rows, cells, rows.flatten()[cells])


class RotaryTable:
    """cos and sin by position, for the family's rotary embedding and its long-context scaling.

    The frequencies of scaled kinds (linear, llama3, yarn, …) come from transformers' own functions, so that trainer,
    engine and HuggingFace agree (transformers/modeling_rope_utils.py).
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        frequencies, self.scale = rotary_frequencies(shape.rope, shape)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> tuple[Float[Tensor, " T head_dim"], Float[Tensor, " T head_dim"]]:
        angles = positions[:, None].float() * self.frequencies[None]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotary_frequencies(rope: Rope, shape: ModelShape) -> tuple[Float32[Tensor, " half_head_dim"], float]:
    """(inverse frequencies, factor on cos and sin)."""
    if rope.kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / rope.theta**exponents, 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PretrainedConfig(
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
    )
    config.rope_parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters}
    return ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
