"""Router replay: tokens go to the experts that they were routed to in the engine (R3, arXiv 2510.11370).

The experts' weights are computed as always, from this model's scores of those experts, and are differentiated.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from rlhpc.backends.megatron.packed import PackedParams


class ReplayLayer(TransformerLayer):
    """A layer with experts, whose tokens' routed experts come from the packed parameters.

    They are passed on as padding_mask: the only per-token tensor that Megatron passes from layer to experts, also when
    it recomputes activations of the whole layer.
    """

    def forward(self, *args: Any, packed_seq_params: PackedParams, **options: Any) -> Any:
        routed = packed_seq_params.routed
        if routed is not None:
            before, each = self.layer_number - 1, self.config.moe_layer_freq
            place = before if isinstance(each, int) else sum(each[:before])  # among the layers with experts
            if routed.layers is not None:
                place = routed.layers.index(place)
            options["padding_mask"] = routed.experts[:, place]
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)
