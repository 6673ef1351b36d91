"""MoE layer of Megatron with rlhpc's token movement: rows go to their experts' ranks and back.

Every exchange has a counterpart in the backward pass, in which ranks without rows take part too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int16, Int64
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, sort_choices, sum_rows, take_choices, take_rows
from rlhpc.backends.kernels.compiled import compiled
from rlhpc.backends.megatron.experts import GroupedExperts, Routing
from rlhpc.parallel.compat import device


class ExpertLayer(MoELayer):
    """Upstream's modules and names of parameters, without its token dispatchers: they sort through maps [tokens,
    experts] and wait for the GPU three times (token_dispatcher.py)."""

    experts: GroupedExperts

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, **options: Any) -> None:
        super().__init__(config, submodules, **options)
        group = self.token_dispatcher.tp_ep_group
        self._exchange = None if group.size() == 1 else self._exchange_of(config, group)
        self.token_dispatcher = None

    def _exchange_of(self, config: TransformerConfig, group: dist.ProcessGroup) -> AllToAll | AllGather:
        kind = AllGather if config.moe_token_dispatcher_type == "allgather" else AllToAll
        parts = group.size() // self.ep_group.size()
        return kind(group, self.ep_group.rank(), parts, self.num_local_experts, config.num_moe_experts)

    def forward(
        self, hidden_states: Float[Tensor, "T 1 hidden"], intermediate_tensors: Any = None, *, padding_mask: Any
    ) -> tuple[Float[Tensor, "T 1 hidden"], None]:
        """``padding_mask``: the tokens' part of ``RoutedExperts``, from ``ReplayLayer``."""
        assert self.attn_tp_group.size() == 1 or self.config.sequence_parallel or not self.training
        if self.moe_layer_recompute:
            keep_whole = False
            return tensor_parallel.checkpoint(self._compute, keep_whole, hidden_states, padding_mask), None
        return self._compute(hidden_states, padding_mask), None

    def _compute(self, hidden_states: Tensor, given: Int16[Tensor, "T k"]) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        x = hidden_states.view(-1, hidden_states.size(-1))
        routing = self.router(x, given)
        if self._exchange is None:
            output = self.experts(x, routing.weights, routing.choices)
        else:
            output = self._exchange(x, routing, self.experts)
        output = output.view(hidden_states.shape)
        return output if shared is None else output + shared


class AllToAll:
    """Each choice's row goes to the ranks that hold its expert, and their outputs come back.

    With ``parts`` > 1, that many ranks hold a part of an expert's intermediate size each: a row goes to all of them, as
    to experts of their own, and their outputs are added like those of different experts.
    """

    def __init__(
        self, group: dist.ProcessGroup, expert_rank: int, parts: int, local_experts: int, num_experts: int
    ) -> None:
        self._group, self._parts, self._local = group, parts, local_experts
        self._numbers = torch.arange(num_experts * parts, device=device())

    def __call__(
        self, x: Float[Tensor, "T hidden"], routing: Routing, experts: GroupedExperts
    ) -> Float[Tensor, "T hidden"]:
        weights, choices = routing.weights, routing.choices
        if self._parts > 1:
            weights = weights.repeat(1, self._parts)
            choices = sort_choices(_experts_of_parts(routing.experts, self._local, self._parts), self._numbers)
        received, sent, counts = self._sizes(choices)
        rows = all_to_all(self._group, take_rows(x, choices), received, sent)
        row_weights = all_to_all(self._group, take_choices(weights, choices), received, sent)
        arrived = sort_choices(self._expert_of_rows(counts, sum(received))[:, None], self._numbers[: self._local])
        output = experts(rows, row_weights[:, None], arrived)
        return sum_rows(all_to_all(self._group, output, sent, received), choices)

    def _sizes(self, choices: SortedChoices) -> tuple[list[int], list[int], Int64[Tensor, "ranks local_experts"]]:
        """(rows from each rank, rows to each rank, rows from each rank for each expert here).

        One copy to the host, for which it waits.
        """
        own = _counts(choices.ends).view(-1, self._local)
        ones = [1] * len(own)
        counts = all_to_all(self._group, own, ones, ones)
        received, sent = torch.stack([counts.sum(1), own.sum(1)]).tolist()
        return received, sent, counts

    def _expert_of_rows(self, counts: Int64[Tensor, "ranks local_experts"], rows: int) -> Int64[Tensor, " rows"]:
        """Expert here of each row, as they arrive: by rank, then by expert."""
        local = self._numbers[: self._local].repeat(len(counts))
        return local.repeat_interleave(counts.flatten(), output_size=rows)


class AllGather:
    """All ranks get all tokens, compute those of their experts, and add up their outputs.

    Ranks have equal numbers of tokens.
    """

    def __init__(
        self, group: dist.ProcessGroup, expert_rank: int, parts: int, local_experts: int, num_experts: int
    ) -> None:
        self._group, self._first = group, expert_rank * local_experts
        self._numbers = torch.arange(local_experts, device=device())

    def __call__(
        self, x: Float[Tensor, "T hidden"], routing: Routing, experts: GroupedExperts
    ) -> Float[Tensor, "T hidden"]:
        rows = gather_from_sequence_parallel_region(x, group=self._group)
        weights = gather_from_sequence_parallel_region(routing.weights, group=self._group)
        with torch.no_grad():
            selected = gather_from_sequence_parallel_region(routing.experts, group=self._group)
        local = _local_numbers(selected, self._first, len(self._numbers))
        output = experts(rows, weights, sort_choices(local, self._numbers, some=True))
        # Added in float32, as upstream does.
        output = reduce_scatter_to_sequence_parallel_region(output.float(), group=self._group)
        return cast(Tensor, output).to(x.dtype)


@compiled
def _counts(ends: Tensor) -> Int64[Tensor, " experts"]:
    return ends.diff(prepend=ends.new_zeros(1)).long()


@compiled
def _experts_of_parts(experts: Int64[Tensor, "T k"], local: int, parts: int) -> Int64[Tensor, "T parts*k"]:
    """Numbers of the experts' parts: those of a rank follow each other, and so do the ranks that share experts."""
    rank, expert = experts // local, experts % local
    return torch.cat([(rank * parts + part) * local + expert for part in range(parts)], dim=1)


@compiled
def _local_numbers(experts: Int64[Tensor, "T k"], first: int, count: int) -> Int64[Tensor, "T k"]:
    """Numbers of the experts here from 0; ``count`` of others."""
    local = experts - first
    return torch.where((local >= 0) & (local < count), local, count)
