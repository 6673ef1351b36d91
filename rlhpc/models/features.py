"""Features of a model that its configuration names: rotary embedding, experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base and, for long contexts, HuggingFace's scaling parameters as given."""

    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """Layers whose feed-forward part is ``num_experts`` small ones, of which each token takes ``top_k``."""

    num_experts: int
    top_k: int
    ffn_size: int  # of one expert
    layers: tuple[int, ...]  # the layers that have experts; the others are dense
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the weights of a token's experts sum to one
    bias: bool = False  # added per expert for the selection only (DeepSeek-V3, section 2.1.2)
    shared_ffn_size: int = 0  # of the experts that every token takes, together
    num_groups: int | None = None  # a token selects groups_kept groups first, then experts in them
    groups_kept: int | None = None
    scale: float = 1.0  # factor on the weights
    router_dtype: Literal["model", "float32"] = "model"  # of the router's logits in vLLM; model: that of the weights

    def float32_router(self, router_dtype: str) -> bool:
        """Whether routers compute their logits in float32 in a model of any dtype; ``actor.moe.router_dtype``."""
        return router_dtype == "float32" or self.router_dtype == "float32"


@dataclass(frozen=True)
class LatentAttention:
    """Keys and values from one small vector per token (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    query_rank: int | None  # None: queries straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a head, without position
    rope_dim: int  # of a head, rotated; one key for all heads
    value_dim: int
    interleaved_rope: bool = True  # pairs are neighbours, not halves
