"""Plans of runs whose recomputed layers' inputs wait in CPU memory, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import MemoryPlan, predict_memory
from rlhpc.plan.estimates.model_memory import rank_models
from rlhpc.plan.search import variants
from rlhpc.sharding.layout import ParallelLayout

READY = Path(__file__).parents[3] / "configs" / "ready"
FULL, AWAY = "actor.memory.recompute=full", "actor.memory.offload_activations=true"
LAYERS, HIDDEN, TOKENS = 28, 3584, 16384  # of Qwen2.5-7B, and of a microbatch
INPUT = 2 * TOKENS * HIDDEN  # bytes of a layer's, in bfloat16
LAYOUTS = {  # changes of the layout, and bytes of an input on a rank
    "tp": (["actor.parallel={tp: 2}"], INPUT // 2),
    "fsdp": (["train.backend=fsdp", "actor.parallel={}"], INPUT),
}


def parts(*changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / "qwen2.5-7b-1node.yaml", [FULL, f"train.tokens_per_microbatch={TOKENS}", *changes])
    shape = read_model(config.model.path)
    return config, shape, check_layout(config, config.slurm.most_nodes, shape)


def activations(plan: MemoryPlan) -> int:
    (found,) = (phase.parts["activations"] for phase in plan.phases if phase.name == "forward and backward")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_inputs_are_in_cpu_memory_and_two_on_the_gpu(layout: str) -> None:
    changes, one = LAYOUTS[layout]
    kept, away = (predict_memory(*parts(*changes, *more), 80.0) for more in ([], [AWAY]))
    assert activations(kept) - activations(away) == (LAYERS - 2) * one
    assert away.cpu.parts["activations"] == LAYERS * one
    assert "activations" not in kept.cpu.parts
    assert away.cpu.node - kept.cpu.node == 8 * LAYERS * one


def test_stages_keep_what_they_have_received_on_the_gpu() -> None:
    """Two stages of 14 layers: the first has two microbatches in flight, the second one."""
    config, shape, layout = parts(AWAY, "actor.parallel={pp: 2}")
    first, last = (rank_models(config, shape, layout, rank)[0] for rank in (0, 4))
    assert first.activations_on_cpu == 2 * 14 * INPUT
    assert last.activations_on_cpu == 13 * INPUT
    kept, *_ = parts("actor.parallel={pp: 2}")
    before = [rank_models(kept, shape, layout, rank)[0].stored for rank in (0, 4)]
    assert [before[0] - first.stored, before[1] - last.stored] == [(28 - 2) * INPUT, (13 - 2) * INPUT]


def test_interleaved_stages_have_most_after_the_first_backward_passes() -> None:
    """Two chunks of 7 layers on each of two stages. Of the first stage: before the first backward
    pass three of the first chunk, whose inputs are all its own, and two of the second; then four and one."""
    config, shape, layout = parts(AWAY, "actor.parallel={pp: 2, vpp: 2}")
    (model, *_) = rank_models(config, shape, layout, 0)
    assert model.activations_on_cpu == (4 * 7 + 1 * 6) * INPUT


def test_groups_of_layers_have_one_input() -> None:
    config, shape, layout = parts(AWAY, "actor.parallel={tp: 2}", "actor.memory.recompute_layers=4")
    (model, *_) = rank_models(config, shape, layout, 0)
    assert model.activations_on_cpu == LAYERS // 4 * INPUT // 2


def test_a_search_offloads_where_layers_are_recomputed_alone() -> None:
    config, *_ = parts(AWAY)
    tried = {(each.actor.memory.recompute, each.actor.memory.offload_activations) for each in _variants(config)}
    assert tried == {("none", False), ("selective", False), ("full", True)}
    assert not any(each.actor.memory.offload_activations for each in _variants(parts()[0]))


def _variants(config: RunConfig) -> list[RunConfig]:
    shape = read_model(config.model.path)
    return list(variants(config, check_layout(config, config.slurm.most_nodes, shape), shape, GPUS["h100"]))
