"""The shape of a model of a known family, and the reading of HuggingFace's config fields into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.models.config_reader import ConfigReader, UnsupportedByFamily
from rlhpc.models.describe import quantised
from rlhpc.models.description import ModelDescription, Rope

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


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelDescription):
    """Description of a model of a known family: what its tables and Megatron need beyond that of any model."""

    family: str
    ffn_size: int
    norm_epsilon: float
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False

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


@dataclass(frozen=True)
class Defaults:
    """Values of fields that a ``config.json`` may lack: those of the class that transformers has for the family."""

    theta: float = 10000.0
    norm_epsilon: float = 1e-6
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads


def read_rope(reader: ConfigReader, default_theta: float = Defaults.theta) -> Rope:
    """Reads ``rope_parameters`` of transformers 5, or ``rope_theta`` and ``rope_scaling`` of older files."""
    theta = reader.get("rope_theta")
    parameters = {**(reader.get("rope_scaling") or {}), **(reader.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta", None) or theta or default_theta
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if parameters.get("partial_rotary_factor") == 1.0:  # the whole head
        del parameters["partial_rotary_factor"]
    _check_rope(kind, parameters, reader.where)
    return Rope(float(theta), kind, parameters)


def _check_rope(kind: str, parameters: Mapping[str, Any], where: str) -> None:
    """Refuses a scaling that is not implemented, lacks a parameter or has an unknown one."""
    if kind not in _ROPE_KINDS:
        raise UnsupportedByFamily(
            f"rope_type = {kind!r} is not supported",
            where=where,
            remedy="supported: "
            + ", ".join(map(repr, _ROPE_KINDS))
            + ("; or set model.rope_tokens" if kind == "dynamic" else ""),
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
        raise UnsupportedByFamily(
            f"{unknown[0]!r} = {parameters[unknown[0]]!r} is not understood for rope_type {kind!r}",
            where=where,
            remedy="remove it if it has no effect",
        )


def read_dense(
    reader: ConfigReader, family: str, architecture: str, defaults: Defaults = Defaults(), **features: Any
) -> ModelShape:
    """Returns the shape from the fields that Llama-like families share; ``features`` go into it unchanged."""
    if reader.get("quantization_config"):
        raise quantised(reader.where)
    reader.expect("hidden_act", ("silu",))
    if reader.get("use_sliding_window", False):
        reader.expect("use_sliding_window", (False,))
    hidden_size, num_heads = int(reader.need("hidden_size")), int(reader.need("num_attention_heads"))
    fields: dict[str, Any] = {
        "family": family,
        "architecture": architecture,
        "model_type": str(reader.get("model_type") or ""),
        "num_layers": int(reader.need("num_hidden_layers")),
        "hidden_size": hidden_size,
        "ffn_size": int(reader.need("intermediate_size")),
        "num_heads": num_heads,
        "num_kv_heads": int(reader.nullable("num_key_value_heads", defaults.num_kv_heads) or num_heads),
        "head_dim": int(reader.nullable("head_dim", defaults.head_dim) or reader.head_dim()),
        "vocab_size": int(reader.need("vocab_size")),
        "max_positions": int(reader.need("max_position_embeddings")),
        "norm_epsilon": float(reader.get("rms_norm_eps", defaults.norm_epsilon)),
        "rope": read_rope(reader, defaults.theta),
        "tied_embeddings": bool(reader.get("tie_word_embeddings", False)),
    }
    reader.refuse_unread()
    shape = ModelShape(**{**fields, **features})
    reader.check_heads(shape.num_heads, shape.num_kv_heads)
    return shape
