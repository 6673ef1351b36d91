"""A packed batch as the layers see it: this rank's tokens, attention segments and rotary angles.

All are computed once for all layers. Sizes and orders of tokens are those of ``sharding/context_split.py``: T in the
batch, L on this rank, P on all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int16, Int64
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhpc.api import PackedBatch
from rlhpc.backends.kernels.exchanges import ContextIndex, gather_packed, select_local
from rlhpc.models import ModelShape, Rope
from rlhpc.sharding.context_split import ContextSplit

_PADDING = -1  # in place of a token's experts


@dataclass(frozen=True)
class RoutedExperts:
    """Experts for router replay, as in ``PackedBatch``, of the tokens that this rank's routers see; -1: padding, which
    counts in no statistic or loss of the routers."""

    experts: Int16[Tensor, "tokens layers topk"]
    layers: tuple[int, ...] | None

    def of(self, place: int) -> Int16[Tensor, "tokens topk"]:
        """Experts of a layer by its place among those with experts; without replay, all share one column."""
        if self.layers is not None:
            place = self.layers.index(place)
        return self.experts[:, place if self.experts.size(1) > 1 else 0]


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's record of a packed batch, with what our modules need in addition. L is this rank's tokens."""

    cos: Float32[Tensor, "L rope_dim"] = None
    sin: Float32[Tensor, "L rope_dim"] = None
    context: ContextIndex = None
    routed: RoutedExperts = None


def packed_params(
    context: ContextIndex, rope: RotaryTable, positions: Int64[Tensor, " L"], routed: RoutedExperts
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


@dataclass(frozen=True)
class LocalBatch:
    """Input of one context-parallel rank's model."""

    tokens: Int64[Tensor, " L"]
    positions: Int64[Tensor, " L"]
    params: PackedParams

    def select(self, values: Float[Tensor, "T ..."]) -> Float[Tensor, "L ..."]:
        """This rank's part of per-token values of the batch; 0 for padding tokens."""
        return select_local(values, self.params.context)

    def gather(self, values: Float[Tensor, "L ..."], group: dist.ProcessGroup | None) -> Float[Tensor, "T ..."]:
        """See ``gather_packed``."""
        return gather_packed(values, self.params.context, group)


def local_batch(
    batch: PackedBatch, split: ContextSplit, rank: int, rope: RotaryTable, router_part: tuple[int, int] = (0, 1)
) -> LocalBatch:
    """The part of ``batch`` for ``rank`` of the context-parallel group.

    ``router_part``: (index, count) of the equal parts of its tokens, one of which this rank's routers see.
    """
    context = ContextIndex(split, rank, batch.tokens.device)
    positions = torch.from_numpy(context.part.positions).to(batch.tokens.device)
    index, count = router_part
    experts = batch.routed_experts
    if experts is None:
        experts = batch.tokens.new_zeros(len(batch.tokens), 1, 1, dtype=torch.int16)
    if batch.is_blank:
        experts = torch.full_like(experts, _PADDING)
    own = select_local(experts, context, _PADDING).chunk(count)[index]
    params = packed_params(context, rope, positions, RoutedExperts(own, batch.routed_layers))
    return LocalBatch(select_local(batch.tokens, context), positions, params)
