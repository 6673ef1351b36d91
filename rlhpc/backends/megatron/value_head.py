"""Head of a critic or reward model: one number for each token, replicated on the ranks of the last stage."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class ValueHead(torch.nn.Module):
    """Replaces ``GPTModel.output_layer``. Starts at zero, so that a new critic predicts 0."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        # Each rank has a part of the tokens: Megatron sums such gradients over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Float[Tensor, "L 1 H"], **_: Any) -> tuple[Float[Tensor, "L 1 1"], None]:
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the loss of all tokens, so that the backward pass selects its own part without a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


def give_value_head(model: GPTModel, config: TransformerConfig) -> None:
    """Adds the head to a module of the last stage."""
    model.output_layer = ValueHead(config)
    model.setup_embeddings_and_output_layer()
