"""Heads of Megatron's model: of a policy, and of a critic or reward model.

For a policy, hidden states leave the model, and log-probs and entropy are of rows that are trained on. A critic or
reward model has one number for each token, replicated on the ranks of the last stage.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from jaxtyping import Float, Int64
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlhpc.api import PackedBatch, TokenStats
from rlhpc.backends.kernels.loss_head import Head, head_stats
from rlhpc.backends.megatron.packed import LocalBatch


class OutputWeight(torch.nn.Module):
    """Replaces ``GPTModel.output_layer``: has its weight, if it has one of its own, and returns hidden states."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__()
        self.register_parameter("weight", layer.weight)
        self._group = layer.tp_group

    def forward(self, hidden: Float[Tensor, "L 1 H"], **_: Any) -> tuple[Float[Tensor, "L 1 H"], None]:
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """State for Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def keep_hidden_states(model: GPTModel) -> None:
    """Makes a module of the last stage return hidden states [1, L, H], of the sequence-parallel part where there is
    one, instead of logits."""
    model.output_layer = OutputWeight(model.output_layer)


def head_weight(model: GPTModel) -> Float[Tensor, "V_local H"]:
    """The last stage's, which a table of embeddings may share."""
    shared = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if shared else model.output_layer.weight


def policy_stats(
    model: GPTModel,
    hidden: Float[Tensor, "L H"],
    batch: PackedBatch,
    local: LocalBatch,
    vocab_size: int,
    temperature: float,
) -> TokenStats:
    """Stats of the whole batch's trained tokens, and 0 elsewhere. ``hidden``: see ``keep_hidden_states``."""
    weight = local.select(batch.loss_weight)
    index = weight.nonzero()[:, 0]
    rows = trained_rows(hidden, index, len(weight), sequence_parallel=model.config.sequence_parallel)
    head = Head(vocab_size, parallel_state.get_tensor_model_parallel_group(), temperature)
    kept = None if batch.kept is None else local.select(batch.kept)[index]
    stats = head_stats(rows, head_weight(model), local.select(batch.targets)[index], head, kept)
    zeros = torch.zeros_like(weight)
    both = torch.stack([zeros.index_copy(0, index, x) for x in (stats.log_probs, stats.entropy)], dim=-1)
    return TokenStats(*local.gather(both, parallel_state.get_context_parallel_group()).unbind(-1))


def trained_rows(
    hidden: Float[Tensor, "part H"], index: Int64[Tensor, " N"], tokens: int, *, sequence_parallel: bool
) -> Float[Tensor, "N H"]:
    """Hidden states of some of ``tokens`` tokens on every tensor-parallel rank; ``index`` is ascending.

    Backward, their gradient is summed over the ranks, each of which has a part of the vocabulary. With sequence
    parallelism, ranks exchange these rows alone, as many as the rank with the most has.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if not sequence_parallel:
        rows = hidden if len(index) == tokens else hidden.index_select(0, index)
        return copy_to_tensor_model_parallel_region(rows, group)
    part, ranks = tokens // group.size(), group.size()
    bounds = torch.searchsorted(index, torch.arange(ranks + 1, device=index.device) * part).tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    most = max(1, *counts)  # without any row, one is exchanged for the gradient's sake
    own = index[bounds[group.rank()] : bounds[group.rank() + 1]] - group.rank() * part
    own = torch.nn.functional.pad(own, (0, most - len(own)))
    gathered = gather_from_sequence_parallel_region(
        hidden.index_select(0, own), tensor_parallel_output_grad=True, group=group
    )
    if min(counts) == most:
        return gathered
    starts = [torch.arange(count, device=index.device) + rank * most for rank, count in enumerate(counts)]
    return gathered.index_select(0, torch.cat(starts))


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
        """State for Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


def give_value_head(model: GPTModel, config: TransformerConfig) -> None:
    """Adds the head to a module of the last stage."""
    model.output_layer = ValueHead(config)
    model.setup_embeddings_and_output_layer()
