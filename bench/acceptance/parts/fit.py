"""Number of layers that can be trained on a GPU, by the planner's memory model. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhpc.config.training import MemorySection, MoeSection, ParallelSection
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.activations import ActivationSetting
from rlhpc.plan.estimates.fsdp_activations import FsdpSetting
from rlhpc.plan.estimates.fsdp_memory import make_fsdp_model
from rlhpc.plan.estimates.model_memory import MegatronModel
from rlhpc.plan.estimates.optimizer_memory import default_bucket, state_bytes
from rlhpc.plan.estimates.rank_model import Tokens
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import MeshSizes

# Cheapest first. Feed-forward activations are most of a layer's and cheap to recompute.
RECOMPUTE: tuple[MemorySection, ...] = (
    MemorySection(),
    MemorySection(recompute="selective", recompute_modules=["mlp", "moe"]),
    MemorySection(recompute="full"),
)
# On a single rank there is nothing to gather or to sum: weights and gradients are copied less often.
RECOMPUTE_FSDP: tuple[MemorySection, ...] = (
    MemorySection(reshard_after_forward=False, accumulation="keep"),
    MemorySection(reshard_after_forward=False, accumulation="reduce"),
    *(memory.model_copy(update={"accumulation": "reduce"}) for memory in RECOMPUTE),
)
Planned = Callable[[ModelShape, int, MemorySection], int]


def planned_bytes(shape: ModelShape, tokens: int, memory: MemorySection) -> int:
    """Peak bytes of an update in bfloat16 on one rank, with microbatches of ``tokens``."""
    layout = ParallelLayout(1)
    state = state_bytes(shape, layout, 0, "bfloat16", bucket=default_bucket(layout))
    in_float32 = shape.experts is not None and shape.experts.float32_router(MoeSection().router_dtype)
    setting = ActivationSetting(shape, layout, ParallelSection(), memory, "bfloat16", float32_router=in_float32)
    model = MegatronModel("actor", setting, 0, state, Tokens(tokens, tokens, 2), trained=True)
    return state.parameters + state.gradients + state.optimizer + model.stored + model.workspace


def planned_fsdp_bytes(shape: ModelShape, tokens: int, memory: MemorySection) -> int:
    """The same on FSDP2."""
    setting = FsdpSetting(shape, 1, ParallelSection(), memory, "bfloat16")
    model = make_fsdp_model("actor", setting, MeshSizes(), 0, Tokens(tokens, tokens, 2), "adamw")
    state = model.updating_state
    return state.parameters + state.gradients + state.optimizer + sum(model.update_parts.values())


def most_layers(cut: Callable[[int], ModelShape], tokens: int, limit: int) -> int:
    """Maximum number of layers that train without recomputation within ``limit`` bytes, at least 1.

    ``cut``: shape with a given number of layers; it may return fewer, which ends the search.
    """
    layers = 1
    while cut(layers + 1).num_layers == layers + 1 and planned_bytes(cut(layers + 1), tokens, RECOMPUTE[0]) <= limit:
        layers += 1
    return layers


def recomputations(
    shape: ModelShape,
    tokens: int,
    limit: int,
    planned: Planned = planned_bytes,
    ways: Sequence[MemorySection] = RECOMPUTE,
) -> Sequence[MemorySection]:
    """Recomputation settings to try, from the cheapest that fits; only the last if none does."""
    first = next((i for i, memory in enumerate(ways) if planned(shape, tokens, memory) <= limit), -1)
    return ways[first:]
