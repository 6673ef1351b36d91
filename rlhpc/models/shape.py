"""A model's shape in one value, and the reading of HuggingFace's config fields into it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhpc.core.errors import UserError, did_you_mean

_STRETCHED = ("yarn", "linear")  # scalings for which vLLM multiplies a model's positions by the factor


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


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and features of a decoder-only transformer."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    head: Literal["vocabulary", "value"] = "vocabulary"  # value: one number per token, for critics and reward models

    @property
    def with_value_head(self) -> ModelShape:
        """Shape with a value head instead of its own."""
        return replace(self, head="value", tied_embeddings=False)

    @property
    def usable_positions(self) -> int:
        """Positions that the engine accepts: under some scalings, the original ones times the factor."""
        if self.rope.kind not in _STRETCHED:
            return self.max_positions
        original = int(self.rope.parameters.get("original_max_position_embeddings") or self.max_positions)
        return max(self.max_positions, int(original * float(self.rope.parameters["factor"])))

    @property
    def rope_dim(self) -> int:
        """Rotated dimensions of a head."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the products of queries and keys. Latent attention under yarn has one more (transformers'
        modeling_deepseek_v3.py, yarn_apply_mscale)."""
        factor, over_all = (float(self.rope.parameters.get(name) or 0.0) for name in ("factor", "mscale_all_dim"))
        more = 0.1 * over_all * math.log(factor) + 1.0 if self.latent and factor > 1 else 1.0
        return more**2 / math.sqrt(self.head_dim)


# Fields without effect on the network's function: bookkeeping, generation, disabled training settings.
_NEUTRAL = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "layer_types",
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


# Fields that are counts, and their largest plausible values.
_COUNTS = {
    "num_hidden_layers": 10**4,
    "max_position_embeddings": 10**9,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ),
        10**7,
    ),
}

_REALS = ("rms_norm_eps", "rope_theta")


class ConfigReader:
    """Reads the fields of one ``config.json``, and refuses those that were not read."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self.where, self._read = fields, where, set(_NEUTRAL)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._fields.get(name, default)
        if name in _COUNTS and value is not None and (type(value) is not int or not 1 <= value <= _COUNTS[name]):
            raise UserError(
                f"{name} = {value!r} is not a valid count",
                where=self.where,
                remedy=f"restore the file; an integer from 1 to {_COUNTS[name]:,} is expected",
            )
        if name in _REALS and value is not None and (type(value) not in (int, float) or value <= 0):
            raise UserError(f"{name} = {value!r} is not a number above 0", where=self.where, remedy="restore the file")
        return value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{name!r} is missing", where=self.where, remedy=did_you_mean(name, self._fields))
        return value

    def expect(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuses a field with a value that is not implemented; without the field, the first of ``allowed`` holds."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{name} = {value!r} is not supported",
                where=self.where,
                remedy="supported: " + ", ".join(repr(a) for a in allowed),
            )

    def check_experts(self, experts: Experts) -> None:
        """Refuses impossible numbers of experts."""
        least = 2 if experts.normalise else 1  # a single normalised weight is always 1: nothing to learn
        if not least <= experts.top_k <= experts.num_experts:
            raise UserError(
                f"num_experts_per_tok = {experts.top_k} of {experts.num_experts} experts is not supported",
                where=self.where,
                remedy=f"supported: {least} to {experts.num_experts}",
            )
        if experts.num_groups and experts.num_experts % experts.num_groups:
            raise UserError(
                f"{experts.num_groups} groups do not divide the {experts.num_experts} experts",
                where=self.where,
                remedy="correct n_group",
            )

    def refuse_unread(self) -> None:
        """Refuses fields that were not read and may have an effect."""
        unknown = sorted(set(self._fields) - self._read)
        if unknown:
            raise UserError(
                f"{unknown[0]!r} = {self._fields[unknown[0]]!r} is not understood by this model family",
                where=self.where,
                remedy="remove the field if it has no effect, or add it to the family's file in rlhpc/models",
            )


# Scalings whose frequencies are independent of the sequence length: required and optional parameters of each
# (transformers/modeling_rope_utils.py).
_ROPE_KINDS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "high_freq_factor", "low_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        ),
    ),
}


def read_rope(reader: ConfigReader, default_theta: float = 10000.0) -> Rope:
    """Reads ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of older files."""
    theta, scaling = reader.get("rope_theta"), dict(reader.get("rope_scaling") or {})
    parameters = {**scaling, **dict(reader.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta", None) or theta or default_theta
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if parameters.get("partial_rotary_factor") == 1.0:  # the whole head
        del parameters["partial_rotary_factor"]
    _check_rope(kind, parameters, reader.where)
    return Rope(float(theta), kind, parameters)


def _check_rope(kind: str, parameters: Mapping[str, Any], where: str) -> None:
    """Refuses a scaling that is not implemented, lacks a parameter or has an unknown one."""
    if kind not in _ROPE_KINDS:
        raise UserError(
            f"rope_type = {kind!r} is not supported",
            where=where,
            remedy="supported: " + ", ".join(map(repr, _ROPE_KINDS)),
        )
    needed, optional = _ROPE_KINDS[kind]
    missing = [name for name in needed if parameters.get(name) is None]
    unknown = sorted(set(parameters) - set(needed) - set(optional))
    if missing:
        raise UserError(
            f"{missing[0]!r} is missing from the rotary parameters of rope_type {kind!r}",
            where=where,
            remedy="restore it as the model was published",
        )
    if unknown:
        raise UserError(
            f"{unknown[0]!r} = {parameters[unknown[0]]!r} is not understood for rope_type {kind!r}",
            where=where,
            remedy="remove it if it has no effect",
        )


def read_dense(
    reader: ConfigReader, family: str, architecture: str, default_theta: float = 10000.0, **features: Any
) -> ModelShape:
    """Returns the shape from the fields that Llama-like families share; ``features`` go into it unchanged."""
    if reader.get("quantization_config"):
        raise UserError(
            "the weights are quantised (quantization_config)",
            where=reader.where,
            remedy="convert them to bfloat16 and remove the field; DeepSeek's repository has fp8_cast_bf16.py for it",
        )
    reader.expect("hidden_act", ("silu",))
    if reader.get("use_sliding_window", False):
        reader.expect("use_sliding_window", (False,))
    hidden_size, num_heads = int(reader.need("hidden_size")), int(reader.need("num_attention_heads"))
    fields: dict[str, Any] = {
        "family": family,
        "architecture": architecture,
        "num_layers": int(reader.need("num_hidden_layers")),
        "hidden_size": hidden_size,
        "ffn_size": int(reader.need("intermediate_size")),
        "num_heads": num_heads,
        "num_kv_heads": int(reader.get("num_key_value_heads") or num_heads),
        "head_dim": int(reader.get("head_dim") or hidden_size // num_heads),
        "vocab_size": int(reader.need("vocab_size")),
        "max_positions": int(reader.need("max_position_embeddings")),
        "norm_epsilon": float(reader.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(reader, default_theta),
        "tied_embeddings": bool(reader.get("tie_word_embeddings", False)),
    }
    reader.refuse_unread()
    return ModelShape(**{**fields, **features})
