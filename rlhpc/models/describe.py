"""Reads the ``config.json`` of any causal language model of transformers into a description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.models.description import Experts, LatentAttention, ModelDescription, Rope, TensorHeader, used_tensors
from rlhpc.models.rope import LONGROPE

# The configurations of architectures name the same size differently; the first name is the usual one.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_EXPERT_FFN = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size")
_SHARED_FFN = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SECTIONS = ("text_config", "attn_config", "ffn_config")  # parts of a configuration that contain its sizes
_MOST, _MOST_LAYERS, _MOST_POSITIONS = 10**7, 10**4, 10**9
_GENERATE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFY = ("ForSequenceClassification", "ForTokenClassification")
# Their max_position_embeddings already includes the factor (vllm/config/model.py, _get_and_verify_max_len).
_SCALED_POSITIONS = "gemma3"


def describe_fields(
    fields: Mapping[str, Any], where: str, tensors: Sequence[TensorHeader] = (), *, classifier: bool = False
) -> ModelDescription:
    """Returns what the fields of a ``config.json`` and the headers of the weights, if given, say of a model.

    Raises UserError for a model that does not generate text, quantised weights, or without a necessary field.
    ``classifier``: also accept a sequence classifier, whose transformer is the same.
    """
    architecture = _check_kind(fields, where, classifier=classifier)
    reader = _Fields(fields, where)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError("'model_type' is missing", where=where, remedy="restore the file")
    layers, heads = reader.count(_LAYERS, _MOST_LAYERS), reader.count(_HEADS)
    hidden, latent = reader.count(_HIDDEN), _read_latent(reader)
    tied = reader.flag("tie_word_embeddings")
    if tied is None:  # older versions of transformers omit it where it is true
        tied = not any(tensor.of_head for tensor in tensors)
    used = used_tensors(tensors, layers, tied=tied)
    return ModelDescription(
        architecture=architecture,
        model_type=model_type,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=reader.optional(_FFN),
        num_heads=heads,
        num_kv_heads=heads if latent else _kv_heads(reader, heads),
        head_dim=_head_dim(reader, latent, hidden, heads),
        vocab_size=reader.count(("vocab_size",)),
        max_positions=reader.count(_POSITIONS, _MOST_POSITIONS),
        rope=_read_rope(reader, model_type),
        tied_embeddings=tied,
        experts=_read_experts(reader, layers, used),
        latent=latent,
        tensors=used,
    )


def _check_kind(fields: Mapping[str, Any], where: str, *, classifier: bool) -> str:
    """Returns the architecture; refuses one that does not generate text, and quantised weights."""
    if fields.get("quantization_config"):
        raise quantised(where)
    names = architectures(fields, where)
    if not names:
        raise UserError("'architectures' is missing", where=where, remedy="restore the file")
    endings = (*_GENERATE, *_CLASSIFY) if classifier else _GENERATE
    if fields.get("is_encoder_decoder") is True or not names[0].endswith(endings):
        raise UserError(
            f"architecture {names[0]!r} is not a causal language model", where=where, remedy="use one that is"
        )
    return names[0]


def quantised(where: str) -> UserError:
    """The error for a model with quantised weights."""
    return UserError(
        "the weights are quantised (quantization_config)",
        where=where,
        remedy="convert them to bfloat16: `rlhpc convert SRC DST --to hf` if they are fp8 in blocks of 128 x 128",
    )


def architectures(fields: Mapping[str, Any], where: str) -> list[str]:
    """The classes that a ``config.json`` names."""
    names = fields.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(
            f"architectures = {str(names)[:80]} is not a list of names", where=where, remedy="restore the file"
        )
    return list(names or [])


class _Fields:
    """Typed values by any of several names, of a configuration or its sections for text."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = dict(fields), where
        for name in _SECTIONS:
            section = fields.get(name)
            if section is not None and not isinstance(section, dict):
                raise UserError(f"{name} is not an object", where=where, remedy="restore the file")
            self._fields |= {key: value for key, value in (section or {}).items() if value is not None}

    def value(self, names: Sequence[str]) -> tuple[str, Any]:
        """The first name whose value is not null, with the value; None without any."""
        return next(((name, self._fields[name]) for name in names if self._fields.get(name) is not None), ("", None))

    def optional(self, names: Sequence[str], most: int = _MOST, least: int = 1) -> int | None:
        """A count; of a list with one for each layer, the largest. None where it is absent."""
        name, value = self.value(names)
        if value is None:
            return None
        counts = value if isinstance(value, list) and value else [value]
        if any(type(count) is not int or not least <= count <= most for count in counts):
            raise UserError(
                f"{name} = {repr(value)[:80]} is not a valid count",
                where=self._where,
                remedy=f"restore the file; an integer from {least} to {most:,} is expected",
            )
        return int(max(counts))

    def count(self, names: Sequence[str], most: int = _MOST) -> int:
        found = self.optional(names, most)
        if found is None:
            raise UserError(f"{names[0]!r} is missing", where=self._where, remedy=did_you_mean(names[0], self._fields))
        return found

    def flag(self, name: str) -> bool | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{name} = {repr(value)[:80]} is neither true nor false", where=self._where)
        return value

    def section(self, name: str) -> dict[str, Any]:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{name} is not an object", where=self._where, remedy="restore the file")
        return dict(value or {})

    def number(self, values: Mapping[str, Any], name: str) -> float | None:
        value = values.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= 1e12):
            raise UserError(f"{name} = {repr(value)[:80]} is not a number above 0", where=self._where)
        return None if value is None else float(value)

    def check(self, right: object, message: str) -> None:
        if not right:
            raise UserError(message, where=self._where, remedy="restore the file")


def _kv_heads(reader: _Fields, heads: int) -> int:
    """Heads of keys and values: all, or one under multi_query, where no field has their number."""
    found = reader.optional(_KV_HEADS)
    if found is None:
        found = 1 if reader.flag("multi_query") else heads
    message = f"num_attention_heads {heads} does not divide into num_key_value_heads {found}"
    reader.check(heads % found == 0, message)
    return found


def _head_dim(reader: _Fields, latent: LatentAttention | None, hidden: int, heads: int) -> int:
    if latent is not None:
        return latent.nope_dim + latent.rope_dim
    found = reader.optional(("head_dim", "kv_channels", "attention_head_dim"))
    reader.check(found or hidden >= heads, f"hidden_size {hidden} is below num_attention_heads {heads}")
    return found or hidden // heads


def _read_latent(reader: _Fields) -> LatentAttention | None:
    rank = reader.optional(("kv_lora_rank",))
    nope, rope = reader.optional(("qk_nope_head_dim",)), reader.optional(("qk_rope_head_dim",))
    if rank is None or nope is None or rope is None:
        return None
    value = reader.optional(("v_head_dim",)) or nope
    return LatentAttention(reader.optional(("q_lora_rank",)), rank, nope, rope, value)


def _read_rope(reader: _Fields, model_type: str) -> Rope:
    """Rotary scaling; of several for kinds of layers, that of full attention."""
    parameters = {**reader.section("rope_scaling"), **reader.section("rope_parameters")}
    if isinstance(inner := parameters.get("full_attention"), dict):
        parameters = dict(inner)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    reader.check(isinstance(kind, str), f"rope_type = {repr(kind)[:80]} is not a name")
    if kind in LONGROPE:
        kind, original = "longrope", reader.optional(("original_max_position_embeddings",), _MOST_POSITIONS)
        parameters |= {"original_max_position_embeddings": original} if original else {}
    for name in ("factor", "original_max_position_embeddings"):
        reader.number(parameters, name)
    theta = reader.number(parameters, "rope_theta") or reader.number({"t": reader.value(("rope_theta",))[1]}, "t")
    parameters.pop("rope_theta", None)
    if model_type.startswith(_SCALED_POSITIONS):
        kind, parameters = "default", {}
    return Rope(theta or 10000.0, kind, parameters)


def _read_experts(reader: _Fields, layers: int, tensors: Sequence[TensorHeader]) -> Experts | None:
    """Routed experts; which layers have them, as the weights show."""
    number = reader.optional(_EXPERTS, least=0)
    if not number or number < 2:
        return None
    top_k = reader.count(_TOP_K)
    reader.check(top_k <= number, f"num_experts_per_tok = {top_k} of {number} experts")
    ffn = reader.optional(_EXPERT_FFN) or reader.count(_FFN)
    shared = reader.optional(_SHARED_FFN, least=0)
    if shared is None:
        name, several = reader.value(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"))
        shared = ffn * (reader.optional((name,), least=0) or 0) if several is not None else 0
    held = sorted({tensor.layer for tensor in tensors if tensor.of_experts and tensor.layer is not None})
    if not tensors:
        held = list(range(reader.optional(("first_k_dense_replace",), least=0) or 0, layers))
    return Experts(number, top_k, ffn, tuple(held), shared_ffn_size=shared) if held else None
