"""A model's shape in one value, and the reading of HuggingFace's config fields into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhpc.core.errors import UserError, did_you_mean


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
    bias: bool = False  # a number per expert that is added for the choice alone (DeepSeek-V3, section 2.1.2)
    shared_ffn_size: int = 0  # of the experts that every token takes, together
    num_groups: int | None = None  # a token chooses groups_kept groups first, then experts among theirs
    groups_kept: int | None = None
    scale: float = 1.0  # factor on the weights


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
    """Everything the plans and the builders need of a decoder-only transformer."""

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def rope_dim(self) -> int:
        """Rotated dimensions of a head."""
        return self.latent.rope_dim if self.latent else self.head_dim


# Fields that say nothing of the network's function: bookkeeping, generation, training-time settings that are off.
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
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class ConfigReader:
    """Reads the fields of one ``config.json``, remembers which, and refuses what nobody read."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where, self._read = fields, where, set(_NEUTRAL)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._fields.get(name, default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{name!r} is missing", where=self._where, remedy=did_you_mean(name, self._fields))
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a field whose value asks for a network that is not built here."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{name} = {value!r} is not supported",
                where=self._where,
                remedy="supported: " + ", ".join(repr(a) for a in allowed),
            )

    def finish(self) -> None:
        """Every field was understood, or is one that does not matter."""
        unknown = sorted(set(self._fields) - self._read)
        if unknown:
            raise UserError(
                f"{unknown[0]!r} = {self._fields[unknown[0]]!r} is not understood by this model family",
                where=self._where,
                remedy="remove the field if it has no effect, or add it to the family's file in rlhpc/models",
            )


def read_rope(reader: ConfigReader) -> Rope:
    """transformers 5 keeps ``rope_parameters``; older files ``rope_theta`` beside ``rope_scaling``."""
    theta, scaling = reader.get("rope_theta"), dict(reader.get("rope_scaling") or {})
    parameters = {**scaling, **dict(reader.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta", None) or theta or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    return Rope(float(theta), kind, parameters)


def read_dense(reader: ConfigReader, family: str, architecture: str, **features: Any) -> ModelShape:
    """The fields that Llama and all that descend from it share."""
    reader.expect("hidden_act", "silu")
    if reader.get("use_sliding_window", False):
        reader.expect("use_sliding_window", False)
    hidden_size, num_heads = int(reader.need("hidden_size")), int(reader.need("num_attention_heads"))
    shape = ModelShape(
        family=family,
        architecture=architecture,
        num_layers=int(reader.need("num_hidden_layers")),
        hidden_size=hidden_size,
        ffn_size=int(reader.need("intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=int(reader.get("num_key_value_heads") or num_heads),
        head_dim=int(reader.get("head_dim") or hidden_size // num_heads),
        vocab_size=int(reader.need("vocab_size")),
        max_positions=int(reader.need("max_position_embeddings")),
        norm_epsilon=float(reader.get("rms_norm_eps", 1e-6)),
        rope=read_rope(reader),
        tied_embeddings=bool(reader.get("tie_word_embeddings", False)),
        **features,
    )
    reader.finish()
    return shape
