"""Checks that the shards of a layout hold every element of a model, each in its place, for any family."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np

from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.sharding.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout
from rlhpc.sharding.shards import Box, megatron_shards, model_tensors

STAGES: list[dict[str, int]] = [
    {},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "first_stage_layers": 1},
    {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    {"pp": 2, "vpp": 2, "last_stage_layers": 2},
]
# Replicated over tp: norms, the router, and latent attention's down projections.
_WHOLE = ("norm.weight", "gate.weight", "e_score_correction_bias", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")


def small_layouts(shape: ModelShape) -> list[ParallelLayout]:
    """Layouts of up to 16 ranks along single and combined axes; expert axes if the model has experts."""
    layouts = []
    for stages, tp, cp in itertools.product(STAGES, (1, 2, 4), (1, 2)):
        pp = stages.get("pp", 1)
        for ep, etp, dp in ((1, 1, 1), (1, 1, 2), (2, 1, 2), (4, 1, 2), (1, 2, 1), (2, 2, 2), (2, 4, 2)):
            ranks, is_dense = tp * cp * dp, shape.experts is None
            if ranks * pp > 16 or ranks % (ep * etp) or (is_dense and ep * etp > 1):
                continue
            layout = ParallelLayout(ranks * pp, tp=tp, cp=cp, ep=ep, etp=etp, **stages)
            with suppress(UserError):
                layout.stage_layers(shape.num_layers)
                layouts.append(layout)
    return layouts


def groups_of(layout: ParallelLayout, *axes: str) -> list[list[int]]:
    """Groups of ranks that differ only along ``axes``, each in order of the axes' nesting."""
    order = EXPERT_AXES if set(axes) & {"etp", "ep", "edp"} else DENSE_AXES
    assert set(axes) <= set(order), f"{axes} mixes dense and expert axes"
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        coord = layout.coord(rank)
        # Groups in Megatron's order: by the remaining axes, innermost fastest.
        key = tuple(coord[axis] for axis in reversed(order) if axis not in axes)
        members.setdefault(key, []).append(rank)
    return [members[key] for key in sorted(members)]


def assert_held_once(shape: ModelShape, layout: ParallelLayout) -> None:
    """Assert that each replica of the model holds every element once, or on every tensor-parallel rank.

    A replica: the ranks that differ along tp and pp; for experts, along etp, ep and pp.
    """
    held = [megatron_shards(shape, layout, rank) for rank in range(layout.world_size)]
    for axes, of_expert in ((("tp", "pp"), False), (("etp", "ep", "pp"), True)):
        tensors = [tensor for tensor in model_tensors(shape) if (tensor.expert is not None) == of_expert]
        for group in groups_of(layout, *axes) if tensors else ():
            counts = {tensor.name: np.zeros(tensor.shape, np.int8) for tensor in tensors}
            for shard in (shard for rank in group for shard in held[rank]):
                is_second_copy = shard.local_name == "output_layer.weight" and shape.tied_embeddings
                if (shard.tensor.expert is not None) == of_expert and not is_second_copy:
                    counts[shard.tensor.name][shard.box.slices] += 1
            for name, count in counts.items():
                assert (count == (layout.tp if name.endswith(_WHOLE) else 1)).all(), (layout, name)


def assert_filled_once(shape: ModelShape, layout: ParallelLayout) -> None:
    """Assert that boxes fill each parameter of each rank from its first to its last element, without overlap.

    In a padded vocabulary, the last element is that of the last token.
    """
    for rank in range(layout.world_size):
        boxes: dict[tuple[int, str], list[Box]] = {}
        for shard in megatron_shards(shape, layout, rank):
            boxes.setdefault((shard.chunk, shard.local_name), []).append(shard.local_box)
        for (_, name), held in boxes.items():
            filled = np.zeros([max(stops) for stops in zip(*(box.stop for box in held), strict=True)], np.int8)
            for box in held:
                filled[box.slices] += 1
            assert (filled == 1).all(), (layout, rank, name)
            if name.endswith("experts.w13"):
                assert shape.experts is not None
                rows = 2 * shape.experts.ffn_size // layout.etp
                assert filled.shape == (shape.experts.num_experts // layout.ep, rows, shape.hidden_size), layout
