"""Description of any causal language model: sizes and features of its configuration, and headers of its weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, Self

SCORE = "score.weight"  # HuggingFace's name of the head in its sequence classifiers
_STRETCHED = ("yarn", "linear")  # scalings for which vLLM multiplies a model's positions by the factor
_HEADS = frozenset(("lm_head", "embed_out", "score"))  # modules of output heads
_VOCABULARY = frozenset(("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"))
_EMBEDDINGS = _VOCABULARY | {"wpe", "embed_positions", "position_embeddings"}
_OTHER_INPUTS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|multi_modal|mm|patch)[._]", re.IGNORECASE)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OF_EXPERTS = re.compile(r"\.experts(\.|$)|\.block_sparse_moe\.(input|output)_linear\.")
# Buffers that older versions of transformers stored.
_BUFFERS = re.compile(r"\.(inv_freq|masked_bias|attn\.bias|attention\.bias)$")


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape and data type of a weight, as the header of a safetensors file has them."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Number of its layer in the language model; None outside of layers."""
        found = None if self.of_other_inputs else _LAYER.search(self.name)
        return None if found is None else int(found[1])

    @property
    def expert(self) -> int | None:
        """Number of the only expert that it belongs to."""
        found = _EXPERT.search(self.name)
        return None if found is None else int(found[1])

    @property
    def of_experts(self) -> bool:
        """True if it belongs to one routed expert or stacks those of a layer."""
        return _OF_EXPERTS.search(self.name) is not None

    @property
    def of_other_inputs(self) -> bool:
        """True if it belongs to the encoder of images or sound, which text does not use."""
        return _OTHER_INPUTS.search(self.name) is not None

    @property
    def of_head(self) -> bool:
        """True if it belongs to the output head."""
        return self.layer is None and not _HEADS.isdisjoint(self.name.split("."))

    @property
    def of_embedding(self) -> bool:
        """True if it is a table that tokens or positions are looked up in."""
        return self.layer is None and not self.of_other_inputs and not _EMBEDDINGS.isdisjoint(self.name.split("."))

    @property
    def of_vocabulary(self) -> bool:
        """True if it is the table of the vocabulary's embeddings."""
        return len(self.shape) == 2 and self.of_embedding and not _VOCABULARY.isdisjoint(self.name.split("."))

    @property
    def is_matrix(self) -> bool:
        """True if tokens are multiplied with it; the biases of stacked experts have two dimensions, too."""
        bias = self.name.endswith("bias")
        return len(self.shape) > 1 and not (bias or self.of_head or self.of_embedding or self.of_other_inputs)

    @property
    def is_buffer(self) -> bool:
        """True if it is derived from the configuration; biases of attention have one dimension."""
        found = _BUFFERS.search(self.name)
        return found is not None and (found[1] in ("inv_freq", "masked_bias") or len(self.shape) == 4)


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Sizes of a decoder-only transformer of any architecture, and its weights where the files were read.

    Features that an architecture has beyond these are in transformers' model alone.
    """

    architecture: str
    model_type: str = ""  # transformers' name of the configuration's class
    num_layers: int
    hidden_size: int
    ffn_size: int | None  # of a dense layer
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    vocab_size: int
    max_positions: int
    rope: Rope | None
    tied_embeddings: bool
    experts: Experts | None = None
    latent: LatentAttention | None = None
    head: Literal["vocabulary", "value"] = "vocabulary"  # value: one number per token, for critics and reward models
    tensors: tuple[TensorHeader, ...] = ()  # empty for a known family, whose table has them

    @property
    def with_value_head(self) -> Self:
        """Description with a value head instead of its own."""
        tensors = self.tensors
        if tensors and self.head == "vocabulary":
            score = TensorHeader(SCORE, (1, self.hidden_size), tensors[0].dtype)
            tensors = (*(tensor for tensor in tensors if not tensor.of_head), score)
        return replace(self, head="value", tied_embeddings=False, tensors=tensors)

    @cached_property
    def token_weights(self) -> tuple[float, ...]:
        """Elements of each layer's matrices that a token is multiplied with: of experts, those of its own. One more
        entry for matrices outside of layers, without embedding and head. Empty without tensors."""
        if not self.tensors:
            return ()
        found = [0.0] * (self.num_layers + 1)
        share = self.experts.top_k / self.experts.num_experts if self.experts else 1.0
        for tensor in self.tensors:
            if tensor.is_matrix:
                layer = tensor.layer
                found[-1 if layer is None else layer] += tensor.numel * (share if tensor.of_experts else 1.0)
        return tuple(found)

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    def positions_in(self, tokens: int) -> int:
        """Positions that documents have in a run whose longest sequence has ``tokens`` tokens: the original ones with
        LongRoPE's short factors (rlhpc.models.rope)."""
        if self.rope is None or self.rope.kind != "longrope":
            return self.usable_positions
        original = int(self.rope.parameters.get("original_max_position_embeddings") or self.max_positions)
        return original if tokens <= original else self.usable_positions

    @property
    def usable_positions(self) -> int:
        """Positions that the engine accepts: under some scalings, the original ones times the factor."""
        if self.rope is None or self.rope.kind not in _STRETCHED:
            return self.max_positions
        original = int(self.rope.parameters.get("original_max_position_embeddings") or self.max_positions)
        return max(self.max_positions, int(original * float(self.rope.parameters.get("factor") or 1.0)))


def used_tensors(found: Iterable[TensorHeader], num_layers: int, *, tied: bool) -> tuple[TensorHeader, ...]:
    """The weights among the tensors of a folder: without buffers, a copy of a tied head, and layers that predict
    several tokens, which are stored after the last one."""
    return tuple(
        tensor
        for tensor in found
        if not tensor.is_buffer
        and not (tied and tensor.of_head)
        and (tensor.layer is None or tensor.layer < num_layers)
    )


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
        """True if routers compute their logits in float32 in a model of any dtype; ``actor.moe.router_dtype``."""
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
