"""A packed batch as the layers see it: attention segments and rotary angles, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float32, Int16, Int64
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhpc.backends.megatron.segments import Segments
from rlhpc.models import ModelShape, Rope
from rlhpc.sharding.context_split import ContextSplit


@dataclass(frozen=True)
class RoutedExperts:
    """Experts for router replay, as in ``PackedBatch``, of the tokens that this rank's routers see."""

    experts: Int16[Tensor, "tokens layers topk"]
    layers: tuple[int, ...] | None


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's record of a packed batch, with what our modules need in addition. L is this rank's tokens."""

    cos: Float32[Tensor, "L rope_dim"] = None
    sin: Float32[Tensor, "L rope_dim"] = None
    context: ContextIndex = None
    routed: RoutedExperts | None = None


class ContextIndex:
    """A split's indices on this rank's device, each created at first use and shared by all layers.

    Sizes and orders of tokens as in ``rlhpc.sharding.context_split``.
    """

    def __init__(self, split: ContextSplit, rank: int, device: torch.device) -> None:
        self.split, self.part, self.device = split, split.part(rank), device

    @cached_property
    def packed(self) -> Int64[Tensor, " L"]:
        """Place of each local token in the batch; -1 for padding."""
        return self._tensor(self.part.packed)

    @cached_property
    def gathered_of_packed(self) -> Int64[Tensor, " T"]:
        return self._tensor(self.split.gathered_of_packed)

    @cached_property
    def gathered_of_whole(self) -> Int64[Tensor, " P"]:
        return self._tensor(self.split.gathered_of_whole)

    @cached_property
    def whole_of_gathered(self) -> Int64[Tensor, " P"]:
        return self._tensor(self.split.whole_of_gathered)

    @cached_property
    def whole(self) -> Segments:
        """Whole sequences, on a rank that has all their tokens for some heads."""
        lengths = self.split.padded_lengths
        return Segments(lengths, lengths, self.device)

    @cached_property
    def visible(self) -> Int64[Tensor, " keys"]:
        """Keys that the local queries attend to, segment after segment, in gathered order."""
        return self._tensor(self.part.visible)

    @cached_property
    def chunks(self) -> Segments:
        """The local queries, with their keys in the order of ``visible``."""
        return Segments(self.part.query_lengths, self.part.visible_lengths, self.device)

    def _tensor(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.device)


def packed_params(
    context: ContextIndex, rope: RotaryTable, positions: Int64[Tensor, " L"], routed: RoutedExperts | None = None
) -> PackedParams:
    """The layers' view of a rank's part of a batch."""
    cos, sin = rope(positions)
    whole = context.whole
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=whole.query_bounds,
        cu_seqlens_kv=whole.key_bounds,
        max_seqlen_q=whole.longest_query,
        max_seqlen_kv=whole.longest_key,
        cos=cos,
        sin=sin,
        context=context,
        routed=routed,
    )


class RotaryTable:
    """cos and sin by position, for the family's rotary embedding and its long-context scaling.

    The frequencies of scaled kinds (linear, llama3, yarn) are computed by transformers' own functions, so that trainer,
    engine and HuggingFace agree (transformers/modeling_rope_utils.py).
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        frequencies, self.scale = rotary_frequencies(shape.rope, shape)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> tuple[Float[Tensor, "L rope_dim"], Float[Tensor, "L rope_dim"]]:
        angles = positions[:, None].float() * self.frequencies[None]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotary_frequencies(rope: Rope, shape: ModelShape) -> tuple[Float32[Tensor, " half_rope_dim"], float]:
    """(inverse frequencies, factor on cos and sin)."""
    if rope.kind == "default":
        exponents = torch.arange(0, shape.rope_dim, 2, dtype=torch.int64).float() / shape.rope_dim
        return 1.0 / rope.theta**exponents, 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PretrainedConfig(
        head_dim=shape.rope_dim,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
    )
    config.rope_parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters}
    return ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
