"""Floating-point operations of a model, without recomputation.

After PaLM (arXiv 2204.02311, appendix B), with causal attention counted at half the square, also under a sliding
window. Weights are those of the tensors where a description has them, else of grouped-query or latent attention and
SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.models import ModelDescription

# The backward pass has two products for each one of the forward pass.
_FORWARD_AND_BACKWARD = 3


def training_flops(shape: ModelDescription, lengths: Sequence[int]) -> float:
    """Returns the operations of a forward and backward pass over sequences of ``lengths`` tokens."""
    return _FORWARD_AND_BACKWARD * forward_flops(shape, lengths)


def forward_flops(shape: ModelDescription, lengths: Sequence[int]) -> float:
    """Returns the operations of a forward pass: two per token and weight, and attention."""
    of_token, of_pair = forward_terms(shape)
    return of_token * sum(lengths) + of_pair * sum(length * (length + 1) / 2 for length in lengths)


def forward_terms(shape: ModelDescription) -> tuple[float, float]:
    """Returns the forward operations per token, and per pair of a token and one that it attends to."""
    if shape.token_weights:
        weights = sum(shape.token_weights)
    else:
        weights = sum(attention_weights(shape) + feed_forward_weights(shape, i) for i in range(shape.num_layers))
    weights += head_rows(shape) * shape.hidden_size
    return 2.0 * weights, float(shape.num_layers * 2 * shape.num_heads * (shape.head_dim + shape.value_dim))


def head_rows(shape: ModelDescription) -> int:
    """Returns the rows of the output projection: the vocabulary, or one for a value head."""
    return 1 if shape.head == "value" else shape.vocab_size


def attention_weights(shape: ModelDescription) -> int:
    """Returns the parameters of one layer's attention projections."""
    hidden, heads = shape.hidden_size, shape.num_heads
    if shape.latent is None:
        return hidden * shape.head_dim * 2 * (heads + shape.num_kv_heads)
    latent = shape.latent
    query_dim = heads * (latent.nope_dim + latent.rope_dim)
    query = hidden * query_dim if latent.query_rank is None else latent.query_rank * (hidden + query_dim)
    down = hidden * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return query + down + up + heads * latent.value_dim * hidden


def feed_forward_weights(shape: ModelDescription, layer: int) -> int:
    """Returns the parameters of a layer's feed-forward part that a token is multiplied with."""
    experts = shape.experts
    if shape.token_weights:
        return max(0, int(shape.token_weights[layer]) - attention_weights(shape))
    if experts is None or layer not in experts.layers:
        return 3 * shape.hidden_size * (shape.ffn_size or 4 * shape.hidden_size)
    router = shape.hidden_size * experts.num_experts
    return 3 * shape.hidden_size * experts.top_k * experts.ffn_size + shared_expert_weights(shape) + router


def shared_expert_weights(shape: ModelDescription) -> int:
    """Returns the parameters of the experts that every token takes in a layer with experts."""
    return 3 * shape.hidden_size * shape.experts.shared_ffn_size if shape.experts is not None else 0
