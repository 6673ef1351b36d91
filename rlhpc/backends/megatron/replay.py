"""Router replay: tokens go to the experts that they were routed to in the engine (R3, arXiv 2510.11370).

The experts' weights are computed as always, from this model's scores of those experts, and are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int16, Int64
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlhpc.backends.megatron.packed import PackedParams


class ReplayLayer(TransformerLayer):
    """A layer with experts, whose tokens' routed experts come from the packed parameters.

    They are passed on as padding_mask: the only per-token tensor that Megatron passes from layer to router, also when
    it recomputes activations of the whole layer or of its experts alone.
    """

    def forward(self, *args: Any, packed_seq_params: PackedParams, **options: Any) -> Any:
        routed = packed_seq_params.routed
        if routed is not None:
            place = sum(self.config.moe_layer_freq[: self.layer_number - 1])  # among the layers with experts
            if routed.layers is not None:
                place = routed.layers.index(place)
            options["padding_mask"] = given_experts(routed.experts[:, place], self.config.num_moe_experts).t()
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class GivenRoutes:
    """Replaces Megatron's RouterReplay (router_replay.py), which holds one batch at a time."""

    def __init__(self, given: Bool[Tensor, "T experts"]) -> None:
        self._given = given

    def get_replay_topk(
        self,
        scores: Float[Tensor, "T experts"],
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        own_choice: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Float[Tensor, "T topk"], Int64[Tensor, "T topk"]]:
        """Scores and indices of the given experts; tokens without given experts use the router's own choice."""
        _, own = own_choice(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self._given.int().topk(topk, dim=1).indices
        index = torch.where(self._given.any(1, keepdim=True), given, own)
        return scores.gather(1, index), index


def given_experts(routed_experts: Int16[Tensor, "T topk"], num_experts: int) -> Bool[Tensor, "T experts"]:
    """Whether each expert is given to each token; ``routed_experts`` as in ``PackedBatch``."""
    given = torch.zeros(len(routed_experts), num_experts + 1, dtype=torch.bool, device=routed_experts.device)
    return given.scatter_(1, routed_experts.long(), value=True)[:, 1:]
