"""Head of a policy on FSDP2: log-probs and entropy inside the head's own module, where its weight is gathered."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor, nn

from rlhpc.api import TokenStats
from rlhpc.backends.kernels.loss_head import Head, head_stats
from rlhpc.core.errors import UserError

# Fields of a configuration by which transformers' models change logits after the product with the head's weight.
_SOFTCAPS = ("final_logit_softcapping",)  # Gemma 2 and 3
_DIVISORS = ("logits_scaling",)  # Granite
_FACTORS = ("logit_scale", "lm_head_multiplier")  # Cohere, Falcon-H1


def head_curve(config: Any) -> tuple[float | None, float]:
    """(softcap, factor after it) of a model's logits."""
    text = config.get_text_config()
    softcap = next((float(cap) for name in _SOFTCAPS if (cap := getattr(text, name, None))), None)
    factor = 1.0
    for name in _DIVISORS:
        factor /= float(getattr(text, name, None) or 1.0)
    for name in _FACTORS:
        factor *= float(getattr(text, name, None) or 1.0)
    return softcap, factor


def fuse_policy_head(head: nn.Module, config: Any) -> None:
    """Makes the head compute stats instead of logits; see ``_policy_stats`` for its arguments.

    Raises UserError for a head that is not one product.
    """
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"the head of {config.model_type!r} is a {type(head).__name__}, not a linear layer",
            where="model.path",
            remedy="use a causal language model whose head is one",
        )
    head.forward = functools.partial(_policy_stats, head, head_curve(config))


def _policy_stats(  # noqa: PLR0913
    head: nn.Linear,
    curve: tuple[float | None, float],
    hidden: Float[Tensor, "1 L H"],
    *,
    index: Int64[Tensor, " N"],
    targets: Int64[Tensor, " N"],
    temperature: float,
    kept: Int32[Tensor, "N most"] | None = None,
) -> Float[Tensor, "2 N"]:
    """Log-probs and entropy of the local tokens ``index``, one after the other; ``kept``: see ``PackedBatch``."""
    rows, weight = hidden[0].index_select(0, index), head.weight
    if head.bias is not None:  # one more column of the weight, which meets a 1 in each row
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        weight = torch.cat([weight, head.bias[:, None]], dim=1)
    softcap, factor = curve
    stats = head_stats(rows, weight, targets, Head(len(weight), None, temperature, softcap, factor), kept)
    return torch.stack([stats.log_probs, stats.entropy])


def whole_stats(stats: Float[Tensor, "2 N"], index: Int64[Tensor, " N"], tokens: int) -> Float[Tensor, "tokens 2"]:
    """Stats of all local tokens: 0 for those that are not trained on."""
    return torch.zeros(tokens, 2, device=stats.device).index_copy(0, index, stats.t())


def as_token_stats(stats: Float[Tensor, "T 2"]) -> TokenStats:
    return TokenStats(*stats.unbind(-1))
