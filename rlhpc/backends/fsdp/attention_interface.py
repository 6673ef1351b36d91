"""Packed attention as a function of transformers' ``AttentionInterface``.

transformers makes no mask for a name without a mask function: documents come from ``documents.py``. What the function
would compute wrongly it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhpc.backends.fsdp.attention_operator import attend_by_heads, register_operator
from rlhpc.backends.fsdp.documents import current_pack
from rlhpc.backends.kernels.packed_attention import Scores
from rlhpc.core.errors import UserError
from rlhpc.models.rope import has_one_table, kind_of, parameter_sets

NAME = "rlhpc_packed"
# Tensors that models pass on and that do not change attention, and those that Scores and sinks cover.
_KNOWN_TENSORS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "s_aux"}
_FEATURES = {
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "block-sparse attention",
}
_VARIABLE_ROPE = {"dynamic", "longrope"}
# Kinds of a configuration's layers that are computed here, or that have no part in attention.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}


def register() -> str:
    """Makes the function known to transformers; returns its name, for ``attn_implementation``."""
    from transformers import AttentionInterface

    register_operator()
    AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads L d"],
    key: Float[Tensor, "1 kv_heads L d"],
    value: Float[Tensor, "1 kv_heads L dv"],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "1 L heads dv"], None]:
    """Causal attention inside each document of the current pack, of rotated queries and keys.

    ``options``: scaling, sliding_window, softcap and s_aux (sinks) of the layer. Raises UserError for a feature of the
    architecture that it does not compute.
    """
    scale = options.get("scaling")
    scores = (query.size(-1) ** -0.5 if scale is None else scale, options.get("sliding_window"), options.get("softcap"))
    traits = module.packed_traits if hasattr(module, "packed_traits") else traits_of(module)
    _refuse(module, "an attention mask of its own" if attention_mask is not None else unsupported(module, options))
    _refuse(module, traits.feature)
    sinks, limit = options.get("s_aux"), traits.limit if options.get("sliding_window") is None else traits.other_limit
    if torch.compiler.is_compiling():  # the graph knows no pack: the operator checks its documents
        return torch.ops.rlhpc.packed_attention(query, key, value, sinks, *scores, limit)[0], None
    pack = current_pack()
    assert query.size(0) == 1, "packed documents are one row"
    assert query.size(2) == key.size(2) == pack.local_tokens, (query.shape, key.shape, pack.local_tokens)
    if limit is not None and pack.longest > limit:
        _refuse(module, traits.reason(limit))
    return attend_by_heads(query, key, value, sinks, Scores(*scores)), None


@dataclass(frozen=True)
class Traits:
    """What a layer's configuration says of its attention: a feature that is not computed, and tokens of a document
    beyond which there is one, with what it is; ``window``: unless the layer passes its window on."""

    feature: str | None
    limits: tuple[tuple[int, str], ...]
    window: tuple[int, str] | None

    @property
    def other_limit(self) -> int | None:
        """Tokens of a document in a layer that passes its window on."""
        return min((tokens for tokens, _ in self.limits), default=None)

    @property
    def limit(self) -> int | None:
        """Tokens of a document in a layer that passes none on."""
        found = [tokens for tokens, _ in (*self.limits, *([self.window] if self.window else []))]
        return min(found, default=None)

    def reason(self, limit: int) -> str:
        """What changes beyond the limit."""
        return next(text for tokens, text in (*self.limits, *([self.window] if self.window else [])) if tokens == limit)


def traits_of(module: torch.nn.Module) -> Traits:
    """Traits of an attention module. They are stored as ``packed_traits`` in modules that are compiled."""
    config = getattr(module, "config", None)
    # Recurrences and convolutions run from one document into the next.
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    kind, limits = _layer_kind(module, config), []
    chunk, window = getattr(config, "attention_chunk_size", None), getattr(config, "sliding_window", None)
    if kind == "chunked_attention" and chunk is not None:
        limits.append((chunk, "attention in chunks shorter than a document"))
    if (longest := longest_document(config)) is not None:
        text = f"a rotary embedding that depends on all documents of a batch beyond {longest} tokens"
        limits.append((longest, text))
    slides = kind == "sliding_attention" and window is not None
    masked = (window, "a sliding window in its mask alone") if slides else None
    return Traits(f"layers of {others[0]}" if others else None, tuple(limits), masked)


def _refuse(module: torch.nn.Module, feature: str | None) -> None:
    if feature:
        message = f"the architecture has {feature}, which packed attention does not compute"
        raise UserError(message, where=_model_of(module), remedy="choose a model without it")


def unsupported(module: torch.nn.Module, options: dict[str, Any]) -> str | None:
    """A feature of a call that changes attention and is not computed."""
    if options.get("dropout"):
        return f"attention dropout of {options['dropout']}"
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attention to later tokens"
    for name, option in options.items():
        if isinstance(option, Tensor) and name not in _KNOWN_TENSORS:
            return _FEATURES.get(name, f"an input {name} of attention")
    return None


def longest_document(config: Any) -> int | None:
    """Maximum tokens of a document beyond which the rotary embedding of a configuration would depend on the longest
    document of a pack: transformers then changes its frequencies for all of them. None with one table for a run."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = []
    for settings in parameter_sets(getattr(text, "rope_parameters", None) or {}):
        kind = kind_of(settings)
        if kind in _VARIABLE_ROPE and not (kind == "longrope" and has_one_table(settings)):
            limits.append(settings.get("original_max_position_embeddings") or text.max_position_embeddings)
    return min(limits, default=None)


def _layer_kind(module: torch.nn.Module, config: Any) -> str:
    """The layer's entry in the configuration's ``layer_types``; by its window where there are none."""
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None:
        return str(kinds[index])
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if slides else "full_attention"


def _model_of(module: torch.nn.Module) -> str:
    """The architecture's name in config.json."""
    return str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))
