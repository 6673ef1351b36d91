"""Reads the fields of a ``config.json`` into typed values, and refuses those that no family reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rlhpc.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from rlhpc.models.description import Experts

_MOST_EXPERTS = 10**6  # over all layers; DeepSeek-V3 has 15,000

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
    "original_max_position_embeddings": 10**9,
    "decoder_sparse_step": 10**4,
    "n_group": 10**4,
    "topk_group": 10**4,
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), 10**4),
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
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ),
        10**7,
    ),
}
_MAY_BE_ZERO = frozenset({"first_k_dense_replace", "n_shared_experts"})
_REALS = frozenset(
    (
        *("rms_norm_eps", "rope_theta", "routed_scaling_factor"),
        *("factor", "high_freq_factor", "low_freq_factor", "attention_factor", "partial_rotary_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    )
)
_MOST_REAL = 1e12
_FLAGS = frozenset(("attention_bias", "norm_topk_prob", "rope_interleave", "tie_word_embeddings", "use_sliding_window"))
_SECTIONS = frozenset(("rope_scaling", "rope_parameters"))


class UnsupportedByFamily(UserError):
    """A model that is valid, but is not of the family, or has a feature that the family's description lacks."""


class UnknownArchitecture(UnsupportedByFamily):
    """A model of no known family."""


class ConfigReader:
    """Reads the fields of one ``config.json``, and refuses those that were not read."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self.where, self._read = fields, where, set(_NEUTRAL)

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, of its type; ``default`` if it is absent or null."""
        self._read.add(name)
        value = self._fields.get(name)
        if value is None:
            return default
        self._check(name, value)
        return value

    def nullable(self, name: str, default: Any) -> Any:
        """The field's value, of its type, or None if it is null; ``default`` if it is absent."""
        value = self.get(name)
        return value if name in self._fields else default

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{name!r} is missing", where=self.where, remedy=did_you_mean(name, self._fields))
        return value

    def expect(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuses a field with a value that is not implemented; without the field, the first of ``allowed`` holds."""
        self._read.add(name)
        value = self._fields.get(name, allowed[0])
        if value not in allowed:
            raise UnsupportedByFamily(
                f"{name} = {_shown(value)} is not supported",
                where=self.where,
                remedy="supported: " + ", ".join(repr(a) for a in allowed),
            )

    def head_dim(self) -> int:
        """Dimension of a head where no field gives it."""
        hidden, heads = self.need("hidden_size"), self.need("num_attention_heads")
        if hidden < heads:
            raise UserError(
                f"hidden_size {hidden} is below num_attention_heads {heads}",
                where=self.where,
                remedy="restore the file, or add head_dim",
            )
        return int(hidden // heads)

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Refuses heads that do not divide into groups for the keys and values."""
        if heads % kv_heads:
            raise UserError(
                f"num_attention_heads {heads} does not divide into num_key_value_heads {kv_heads}",
                where=self.where,
                remedy="restore the file",
            )

    def checked_experts(self, experts: Experts) -> Experts | None:
        """The experts, or None where no layer has any; refuses impossible numbers of them."""
        if not experts.layers:
            return None
        least = 2 if experts.normalise else 1  # a single normalised weight is always 1: nothing to learn
        if not least <= experts.top_k <= experts.num_experts:
            kind = UnsupportedByFamily if experts.top_k <= experts.num_experts else UserError
            raise kind(
                f"num_experts_per_tok = {experts.top_k} of {experts.num_experts} experts is not supported",
                where=self.where,
                remedy=f"supported: {least} to {experts.num_experts}",
            )
        if experts.num_experts * len(experts.layers) > _MOST_EXPERTS:
            raise UserError(
                f"{experts.num_experts} experts in each of {len(experts.layers)} layers are not supported",
                where=self.where,
                remedy=f"supported: {_MOST_EXPERTS:,} in all",
            )
        if experts.num_groups and experts.num_experts % experts.num_groups:
            raise UserError(
                f"{experts.num_groups} groups do not divide the {experts.num_experts} experts",
                where=self.where,
                remedy="correct n_group",
            )
        return experts

    def refuse_unread(self) -> None:
        """Refuses fields that were not read and may have an effect."""
        unknown = sorted(set(self._fields) - self._read)
        if unknown:
            raise UnsupportedByFamily(
                f"{unknown[0][:80]!r} = {_shown(self._fields[unknown[0]])} is not understood by this model family",
                where=self.where,
                remedy="remove the field if it has no effect, or add it to the family's file in rlhpc/models",
            )

    def _check(self, name: str, value: Any) -> None:
        """Refuses a value of another type than the field's, or beyond what a model has."""
        if name in _COUNTS:
            least = 0 if name in _MAY_BE_ZERO else 1
            if type(value) is not int or not least <= value <= _COUNTS[name]:
                self._refuse(name, value, "is not a valid count", f"an integer from {least} to {_COUNTS[name]:,}")
        elif name in _REALS:
            if type(value) not in (int, float) or not 0 <= value <= _MOST_REAL or (not value and "mscale" not in name):
                self._refuse(name, value, "is not a number above 0", "a number")
        elif name in _FLAGS:
            if not isinstance(value, bool):
                self._refuse(name, value, "is neither true nor false", "true or false")
        elif name == "mlp_only_layers":
            if not isinstance(value, list) or any(type(layer) is not int for layer in value):
                self._refuse(name, value, "is not a list of layers", "a list of integers")
        elif name in _SECTIONS:
            self._check_rope(name, value)

    def _check_rope(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            self._refuse(name, value, "is not an object", "an object")
        for inner, item in value.items():
            kinds = {"rope_type": str, "type": str, "truncate": bool}
            if inner in kinds and item is not None and not isinstance(item, kinds[inner]):
                self._refuse(f"{name}.{inner}", item, "has another type", f"a {kinds[inner].__name__}")
            if item is not None:
                self._check(inner, item)

    def _refuse(self, name: str, value: Any, wrong: str, wanted: str) -> NoReturn:
        raise UserError(
            f"{name} = {_shown(value)} {wrong}", where=self.where, remedy=f"restore the file; {wanted} is expected"
        )


def _shown(value: Any) -> str:
    """The value in an error: a number of hundreds of digits, or a nested one, is shortened."""
    text = f"an integer of {value.bit_length()} bits" if type(value) is int and abs(value) > 10**30 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
