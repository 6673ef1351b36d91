"""Router and experts of Megatron's MoE layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int16
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhpc.backends.kernels.choices import SortedChoices, sort_choices
from rlhpc.backends.kernels.expert_mlp import expert_mlp
from rlhpc.backends.megatron.routing import Routing, choose_experts, count_routes, route_weights, weight_rule
from rlhpc.parallel.compat import device


class Router(TopKRouter):
    """Megatron's router, whose routes are values of each token's choices. Its gate is plain PyTorch: upstream's calls
    Transformer Engine (moe_utils.py:1192).

    Counts its decisions while gradients are enabled, for the metrics of an update; a recomputed forward counts once.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.aux_weight = 0.0  # 1 / tokens of the whole batch, set before each update
        self.load = torch.zeros(config.num_moe_experts, device=device())  # tokens per expert
        self.entropy = torch.zeros((), device=device())  # sum over tokens
        self.tokens = torch.zeros((), device=device())
        self._numbers = torch.arange(config.num_moe_experts, device=device())

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Router:
        """Casts parameters, and leaves the bias per expert and its counts unchanged, in float32.

        Float16Module would replace them by bfloat16 copies (module.py, ``convert_module``): weights are loaded into the
        original tensors, and counts above 256 would be rounded.
        """
        before = dict(self._buffers)
        super()._apply(fn, *args)
        for name, buffer in before.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self

    def gating(self, input: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens experts"]:
        """Logits as vLLM computes them: a product rounded to the model's dtype, which its top-k kernels cast to
        float32. In bfloat16 that rounding decides between experts with nearly equal logits."""
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def forward(self, input: Float[Tensor, "T hidden"], given: Int16[Tensor, "T topk"] | None = None) -> Routing:
        """Routing of the tokens; ``given``: experts for router replay, as in ``PackedBatch``."""
        return self.route(self.gating(input), given)

    def route(self, logits: Float[Tensor, "T experts"], given: Int16[Tensor, "T topk"] | None = None) -> Routing:
        experts = choose_experts(logits, self.config, self.expert_bias, given)
        choices = sort_choices(experts, self._numbers)
        rule, scale = weight_rule(self.config), self.config.moe_router_topk_scaling_factor or 1.0
        weights = route_weights(logits, experts, rule, scale)
        if torch.is_grad_enabled():
            if self.training and self.is_aux_loss_enabled():
                map, scores = compute_routing_scores_for_aux_loss(logits.float(), self.topk, self.score_function)
                weights = self._apply_aux_loss(weights, scores, map)
            with torch.no_grad():
                counts = (self.load, self.entropy, self.tokens)
                sizes = count_routes(logits.detach(), choices.ends, *counts, rule)
                if self.enable_expert_bias:
                    self.local_tokens_per_expert += sizes
        return Routing(experts, weights, choices)

    @property
    def counts(self) -> Float[Tensor, " experts+2"]:
        """Load of each expert, sum of entropies, tokens, on this rank since the last reset."""
        return torch.cat([self.load, self.entropy[None], self.tokens[None]])

    def reset_counts(self) -> None:
        """Sets the counts to zero."""
        for counter in (self.load, self.entropy, self.tokens):
            counter.zero_()

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        **_: Any,
    ) -> Tensor:
        """Averages the microbatches' auxiliary losses by tokens; ``aux_loss`` is this rank's part of one.

        Upstream divides in finalize_model_grads, which here receives losses that are divided already.
        """
        tokens = len(activation) * reduce_group.size()
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens * self.aux_weight)


def routers_of(models: Sequence[torch.nn.Module]) -> list[Router]:
    """Routers of this rank's modules, in order of layers."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def biases_of(routers: Sequence[Router]) -> list[Tensor]:
    """Copies of the per-expert biases of the routers that have one."""
    return [router.expert_bias.clone() for router in routers if router.expert_bias is not None]


def restore_biases(routers: Sequence[Router], biases: Sequence[Tensor]) -> None:
    """Restores the copies after a skipped update: Megatron updates the biases when it reduces the gradients
    (finalize_model_grads.py:476), before their norm is known."""
    with_bias = [router for router in routers if router.expert_bias is not None]
    for router, bias in zip(with_bias, biases, strict=True):
        router.expert_bias.copy_(bias)


def routing_metrics(routers: Sequence[Router], top_k: int) -> dict[str, float]:
    """Statistics of the routers' counts, over all ranks and layers; equal on every rank. Collective.

    load_max: tokens of the busiest expert over the mean, in the worst layer; idle: share of experts without tokens;
    dropped: share of token-expert assignments that no expert processed; entropy: of a token's distribution over
    experts, in nats.
    """
    sums = torch.zeros(5, device=device())  # layers, idle, dropped, entropy; then the maximum
    for router in routers:
        counts = router.counts
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        load, entropy, tokens = counts[:-2], counts[-2], counts[-1]
        choices = tokens * top_k
        sums[:4] += torch.stack(
            [torch.ones_like(tokens), (load == 0).float().mean(), 1 - load.sum() / choices, entropy / tokens]
        )
        sums[4] = torch.maximum(sums[4], load.max() * len(load) / choices)
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_reduce(sums[:4], group=group)
    dist.all_reduce(sums[4], op=dist.ReduceOp.MAX, group=group)
    layers, idle, dropped, entropy, busiest = sums.tolist()
    return {
        "experts/load_max": busiest,
        "experts/idle": idle / layers,
        "experts/dropped": dropped / layers,
        "experts/entropy": entropy / layers,
    }


class GroupedExperts(MegatronModule):
    """All experts of this rank in two tensors, with one grouped product each.

    Weights have vLLM's shapes: w13 [experts, 2 x ffn / etp, hidden], gate then up, and w2 [experts, hidden, ffn / etp].
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        self._groups = pg_collection
        ffn, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        options = {"dtype": config.params_dtype, "device": device()}
        self.w13 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * ffn, hidden, **options))
        self.w2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, ffn, **options))
        for weight, dim in ((self.w13, 1), (self.w2, 2)):
            # Reduced over the experts' own data-parallel group, at any ep: checkpoints move between ep sizes.
            weight.allreduce = False
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1

    def forward(
        self, x: Float[Tensor, "T hidden"], weights: Float32[Tensor, "T k"], choices: SortedChoices
    ) -> Float[Tensor, "T hidden"]:
        return expert_mlp(x, weights, self.w13, self.w2, choices)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Global tensors [all experts, …]; gate and up are two parts of dim 1, each sharded over etp."""
        ep, etp, edp = self._groups.ep, self._groups.expt_tp, self._groups.expt_dp
        axis = len(sharded_offsets)
        experts, replica = (axis, ep.rank(), ep.size()), (0, 0, edp.rank())

        def halves(key: str, weight: Tensor, replica_id: tuple, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    *sharded_offsets,
                    experts,
                    (axis + 1, part * etp.size() + etp.rank(), 2 * etp.size()),
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
                for part, half in enumerate(weight.chunk(2, dim=1))
            ]

        w13 = ShardedTensorFactory(f"{prefix}w13", self.w13, halves, lambda parts: torch.cat(parts, dim=1), replica)
        w2 = ShardedTensor.from_rank_offsets(
            f"{prefix}w2",
            self.w2,
            *sharded_offsets,
            experts,
            (axis + 2, etp.rank(), etp.size()),
            replica_id=replica,
            prepend_axis_num=axis,
        )
        return {f"{prefix}w13": w13, f"{prefix}w2": w2}
