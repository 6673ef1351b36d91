"""Packed attention as a function of transformers' ``AttentionInterface``.

transformers makes no mask for a name without a mask function: documents come from ``documents.py``. What the function
would compute wrongly it refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhpc.backends.fsdp.documents import current_pack
from rlhpc.backends.fsdp.ulysses import attend_across_ranks
from rlhpc.backends.kernels.scores import Scores
from rlhpc.core.errors import UserError

NAME = "rlhpc_packed"
# Tensors that models pass on and that do not change attention, and those that Scores and sinks cover.
_KNOWN_TENSORS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "s_aux"}
_FEATURES = {
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "block-sparse attention",
}
# Kinds of a configuration's layers that are computed here, or that have no part in attention.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}


def register() -> str:
    """Makes the function known to transformers; returns its name, for ``attn_implementation``."""
    from transformers import AttentionInterface

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
    pack = current_pack()
    assert query.size(0) == 1, "packed documents are one row"
    assert query.size(2) == key.size(2) == pack.local_tokens, (query.shape, key.shape, pack.local_tokens)
    feature = (
        "an attention mask of its own" if attention_mask is not None else unsupported(module, options, pack.longest)
    )
    if feature:
        message = f"the architecture has {feature}, which packed attention does not compute"
        raise UserError(message, where=_model_of(module), remedy="choose a model without it")
    scale = options.get("scaling")
    scores = Scores(
        query.size(-1) ** -0.5 if scale is None else scale, options.get("sliding_window"), options.get("softcap")
    )
    heads = (x[0].transpose(0, 1) for x in (query, key, value))
    output = attend_across_ranks(*heads, pack, scores, options.get("s_aux"))
    return output[None].contiguous(), None


def unsupported(module: torch.nn.Module, options: dict[str, Any], longest: int) -> str | None:
    """A feature of the layer that changes attention and is not computed, for documents up to ``longest`` tokens."""
    if options.get("dropout"):
        return f"attention dropout of {options['dropout']}"
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attention to later tokens"
    for name, option in options.items():
        if isinstance(option, Tensor) and name not in _KNOWN_TENSORS:
            return _FEATURES.get(name, f"an input {name} of attention")
    config = getattr(module, "config", None)
    # Recurrences and convolutions run from one document into the next.
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if others:
        return f"layers of {others[0]}"
    kind = _layer_kind(module, config)
    chunk = getattr(config, "attention_chunk_size", None)
    if kind == "chunked_attention" and chunk is not None and longest > chunk:
        return f"chunks of {chunk} tokens"
    window = getattr(config, "sliding_window", None)
    if (
        kind == "sliding_attention"
        and options.get("sliding_window") is None
        and window is not None
        and longest > window
    ):
        return "a sliding window in its mask alone"
    return None


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
