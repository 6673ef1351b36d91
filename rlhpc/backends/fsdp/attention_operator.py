"""Packed attention as an operator of ``torch.library``: a layer that is compiled is one graph, which calls it.

The graph knows shapes alone. The forward call computes with autograd on inputs of its own, and keeps what that saved
with the pack, under a number that is its second output; the backward call continues there. Where nothing is kept,
because layers are recomputed, the backward call computes attention again.

Packed attention over context-parallel ranks, by an exchange of heads (Ulysses) or a gather of keys and values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhpc.backends.fsdp.documents import DocumentPack, current_pack
from rlhpc.backends.kernels.exchanges import gather_visible, heads_to_tokens, tokens_to_heads
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import choose_context_method

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_NUMBERS = "float scale, int? window, float? softcap, int? longest"


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
