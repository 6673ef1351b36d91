"""Packed attention as a function of transformers' ``AttentionInterface``, and as an operator of ``torch.library``.

transformers makes no mask for a name without a mask function: documents come from ``documents.py``. The function
refuses features that it would compute wrongly. Context-parallel ranks exchange heads (Ulysses) or gather keys and
values.

A compiled layer is one graph, which calls the operator and knows shapes alone. The forward call computes with autograd
on inputs of its own, and keeps what that saved with the pack, under a number that is its second output; the backward
call continues there. If layers are recomputed, nothing is kept, and the backward call computes attention again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhpc.backends.fsdp.documents import DocumentPack, current_pack
from rlhpc.backends.kernels.exchanges import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.core.errors import UserError
from rlhpc.models.rope import has_one_table, kind_of, parameter_sets
from rlhpc.sharding.layout import choose_context_method

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

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_NUMBERS = "float scale, int? window, float? softcap, int? longest"


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
    """Traits of a layer's attention by its configuration: a feature that is not computed, and tokens of a document
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
        """Feature that begins beyond the limit."""
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


@functools.cache
def register_operator() -> None:
    """Makes ``torch.ops.rlhpc.packed_attention`` known to PyTorch, once in a process."""
    _usual_keys()
    forward = torch.library.custom_op(
        "rlhpc::packed_attention", _forward, mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)"
    )
    backward = torch.library.custom_op(
        "rlhpc::packed_attention_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor gradient, Tensor number, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    forward.register_fake(_forward_shapes)
    backward.register_fake(_backward_shapes)
    forward.register_autograd(_gradients, setup_context=_save)


def attend_by_heads(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scores: Scores) -> Tensor:
    """Attention of [1, heads, L, d] queries in the current pack, as [1, L, heads, dv]."""
    heads = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend_across_ranks(*heads, current_pack(), scores, sinks)[None].contiguous()


def _forward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *numbers: Any) -> tuple[Tensor, Tensor]:
    pack, (*scores, longest) = current_pack(), numbers
    if longest is not None and pack.longest > longest:
        raise UserError(
            f"a document of {pack.longest} tokens, but a layer's attention is computed for up to {longest}",
            where="train.compile",
            remedy="choose another model, or shorter documents",
        )
    with _outside_of_operators(), torch.set_grad_enabled(pack.keeps):
        inputs = _leaves(query, key, value, sinks)
        output = attend_by_heads(*inputs, Scores(*scores))
    number = pack.keep((inputs, output)) if pack.keeps else -1
    return output.detach(), torch.tensor(number)


def _backward(
    gradient: Tensor,
    number: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = current_pack().take(int(number))
    with _outside_of_operators(), torch.enable_grad():
        if kept is None:
            inputs = _leaves(query, key, value, sinks)
            kept = inputs, attend_by_heads(*inputs, Scores(*numbers[:3]))
        inputs, output = kept
        wanted = [x for x in inputs if x is not None]
        found = [x.contiguous() for x in torch.autograd.grad(output, wanted, gradient)]
    own, of_key, of_value = found[:3]
    return own, of_key, of_value, found[3] if sinks is not None else query.new_empty(0)


@contextlib.contextmanager
def _outside_of_operators() -> Iterator[None]:
    """Context in which PyTorch records gradients again, as it does not inside an operator (torch/_library/autograd.py,
    _AutoDispatchBelowAutograd)."""
    with torch._C._ForceDispatchKeyGuard(*_usual_keys()):
        yield


@functools.cache
def _usual_keys() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _leaves(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = torch.is_grad_enabled()
    return tuple(x if x is None else x.detach().requires_grad_(requires_grad=grad) for x in tensors)


def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _dim = query.shape
    return query.new_empty(batch, tokens, heads, value.size(-1)), torch.empty((), dtype=torch.int64)


def _backward_shapes(
    gradient: Tensor, number: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    plain = [x.new_empty(x.shape) for x in (query, key, value)]
    return (*plain, of_sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, *numbers = inputs
    ctx.save_for_backward(output[1], query, key, value, sinks)
    ctx.numbers = numbers


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    number, query, key, value, sinks = ctx.saved_tensors
    found = torch.ops.rlhpc.packed_attention_backward(
        gradient.contiguous(), number, query, key, value, sinks, *ctx.numbers
    )
    return (*found[:3], None if sinks is None else found[3], None, None, None, None)


def attend_across_ranks(
    query: Float[Tensor, "L heads d"],
    key: Float[Tensor, "L kv_heads d"],
    value: Float[Tensor, "L kv_heads dv"],
    pack: DocumentPack,
    scores: Scores,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "L heads dv"]:
    """Attention of this rank's tokens to their documents, of which other ranks of ``pack.group`` hold parts."""
    context, group, attention = pack.context, pack.group, _recomputed if pack.recompute else attend
    if group is None:
        return attention(query, key, value, context.whole, scores, sinks)
    if choose_context_method(query.size(1), key.size(1), group.size(), pack.cp_method).method == "ulysses":
        if sinks is not None:
            # Of the gradient each rank has its own heads' part; that of a parameter is summed over the ranks.
            sinks = sinks.chunk(group.size())[group.rank()]
        query, key, value = tokens_to_heads(query, key, value, context, group)
        return heads_to_tokens(attention(query, key, value, context.whole, scores, sinks), context, group)
    key, value = gather_visible(key, value, context, group)
    return attention(query, key, value, context.chunks, scores, sinks)


def _recomputed(*arguments: Any) -> Tensor:
    return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)
