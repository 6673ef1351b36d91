"""Number of layers that can be trained on a GPU, by the planner's memory model. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhpc.config.training import MemorySection, MoeSection, ParallelSection
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.activations import ActivationSetting
from rlhpc.plan.estimates.model_memory import RankModel, Tokens
from rlhpc.plan.estimates.optimizer_memory import default_bucket, state_bytes
from rlhpc.sharding.layout import ParallelLayout

# Cheapest first. Feed-forward activations are most of a layer's and cheap to recompute.
RECOMPUTE: tuple[MemorySection, ...] = (
    MemorySection(),
    MemorySection(recompute="selective", recompute_modules=["mlp", "moe"]),
    MemorySection(recompute="full"),
)


def planned_bytes(shape: ModelShape, tokens: int, memory: MemorySection) -> int:
    """Peak bytes of an update in bfloat16 on one rank, with microbatches of ``tokens``."""
    layout = ParallelLayout(1)
    state = state_bytes(shape, layout, 0, "bfloat16", bucket=default_bucket(layout))
    in_float32 = shape.experts is not None and shape.experts.float32_router(MoeSection().router_dtype)
    setting = ActivationSetting(shape, layout, ParallelSection(), memory, "bfloat16", float32_router=in_float32)
    model = RankModel("actor", setting, 0, state, Tokens(tokens, tokens, 2), trained=True)
    return state.parameters + state.gradients + state.optimizer + model.stored + model.workspace


def most_layers(cut: Callable[[int], ModelShape], tokens: int, limit: int) -> int:
    """Maximum number of layers that train without recomputation within ``limit`` bytes, at least 1.

    ``cut``: shape with a given number of layers; it may return fewer, which ends the search.
    """
    layers = 1
    while cut(layers + 1).num_layers == layers + 1 and planned_bytes(cut(layers + 1), tokens, RECOMPUTE[0]) <= limit:
        layers += 1
    return layers


def recomputations(shape: ModelShape, tokens: int, limit: int) -> Sequence[MemorySection]:
    """Recomputation settings to try, from the cheapest that fits; only the last if none does."""
    first = next((i for i, memory in enumerate(RECOMPUTE) if planned_bytes(shape, tokens, memory) <= limit), -1)
    return RECOMPUTE[first:]
