"""Memory by phase: what is let go is gone, what does not fit is named, and what is said to help does."""

from __future__ import annotations

import io
import time
from math import prod
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.activations import Setting, stage_kept
from rlhpc.plan.engine import EngineLayout, engine_parameters
from rlhpc.plan.layout import ParallelLayout, make_layout
from rlhpc.plan.memory import (
    GIB,
    MemoryPlan,
    engine_memory,
    engine_numel,
    kv_bytes_per_token,
    predict_memory,
    rank_memory,
    sequence_tokens,
)
from rlhpc.plan.memory_models import rank_models
from rlhpc.plan.memory_remedies import changed_config, find_remedies
from rlhpc.plan.optimizer_memory import Parameter, lay_out, state_bytes

READY = Path(__file__).parents[2] / "configs" / "ready"
SMALL, LARGE = "qwen2.5-7b-1node.yaml", "deepseek-v3-671b-96gpus.yaml"
MODELS = sorted(path for path in (READY / "models").iterdir() if path.is_dir())


def parts(name: str, *changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / name, changes)
    return config, read_model(config.model.path), make_layout(config.parallel, config.world_size)


def phases(plan: MemoryPlan) -> dict[str, dict[str, int]]:
    return {phase.name: phase.parts for phase in plan.phases}


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_the_engine_s_weights_are_those_of_its_parameters(folder: Path) -> None:
    shape = read_model(folder)
    layouts = [EngineLayout(tp) for tp in (1, 2, 4, 8, 16) if shape.num_heads % tp == 0]
    layouts += [EngineLayout(8, expert_parallel=True)] if shape.experts else []
    for layout in layouts:
        assert engine_numel(shape, layout) == sum(prod(size) for size in engine_parameters(shape, layout).values())


def test_a_token_of_the_cache() -> None:
    """By hand: keys and values of 4 heads of 128 in 28 layers; one vector of 576 in 61 layers, whatever tp."""
    _, dense, _ = parts(SMALL)
    _, latent, _ = parts(LARGE)
    assert kv_bytes_per_token(dense, 1, "bfloat16") == 2 * 28 * 2 * 4 * 128
    assert kv_bytes_per_token(dense, 2, "bfloat16") == 28 * 2 * 4 * 128
    assert kv_bytes_per_token(dense, 8, "bfloat16") == 2 * 28 * 2 * 128
    assert kv_bytes_per_token(latent, 8, "bfloat16") == 2 * 61 * 576


def test_the_engine_takes_its_share_and_no_more() -> None:
    config, shape, _ = parts(SMALL)
    engine = engine_memory(config, shape, 80 * GIB)
    share = int(config.rollout.gpu_memory_fraction * 80 * GIB)
    assert engine.weights + engine.working + engine.cache == share
    unknown = engine_memory(config, shape, None)
    assert unknown.tokens == config.rollout.max_running * sequence_tokens(config)


def test_buffers_by_hand() -> None:
    """Places are multiples of 64, ends of 128 and of the ranks; the last parameter comes first."""
    given = [Parameter("a", 100), Parameter("b", 30), Parameter("c", 65, shared=True)]
    one = lay_out(given, ranks=3)
    assert one.places == ((0, 65), (384, 414), (448, 548))
    assert one.buckets == ((0, 384), (384, 768))
    assert one.owned(3, 0) == [(given[2], 65), (given[1], 30), (given[0], 64)]
    assert one.owned(3, 1) == [(given[0], 36)]
    small = lay_out([Parameter(name, 100) for name in "abc"], ranks=1, bucket=150)
    assert small.buckets == ((0, 256), (256, 384))


def test_what_is_let_go_is_away_while_the_engine_generates() -> None:
    offload = "memory.offload={parameters: true, gradients: true, optimizer: true, reference: true}"
    config, shape, layout = parts(SMALL, offload)
    away = phases(rank_memory(config, shape, layout, 0, 80.0))
    kept = phases(
        rank_memory(changed_config(config, {"memory.offload": type(config.memory.offload)()}), shape, layout, 0, 80.0)
    )
    state = state_bytes(shape, layout, 0, "bfloat16", bucket=40_000_000)
    assert kept["rollout"]["weights"] == state.parameters
    assert kept["rollout"]["gradients"] == state.gradients
    assert kept["rollout"]["optimizer"] == state.optimizer
    assert not {"weights", "gradients", "optimizer", "reference: weights"} & away["rollout"].keys()
    assert away["push"]["weights"] == state.parameters, "what is pushed stays until it has been"
    assert away["forward and backward"]["gradients"] == state.gradients
    assert "reference: weights" in away["log-probs"]
    assert "reference: weights" not in away["forward and backward"]


def test_a_fraction_goes_gradients_first() -> None:
    config, shape, layout = parts(SMALL, "memory.offload={gradients: true, optimizer: true, fraction: 0.5}")
    actor = rank_models(config, shape, layout, 0)[0]
    state, left = actor.state, actor.resting
    assert left.gradients == 0
    gone = state.gradients + state.optimizer - left.gradients - left.optimizer
    assert gone == max(state.gradients, (state.gradients + state.optimizer) // 2)


def test_stages_hold_the_micro_batches_that_are_under_way() -> None:
    """1F1B: the first of four stages holds four, the last one; interleaved stages hold more."""
    config, shape, _ = parts(SMALL, "parallel={pp: 4}", "train.prompts_per_step=1024")
    layout = make_layout(config.parallel, 8)
    kept = []
    for stage in range(4):
        (actor, *_) = rank_models(config, shape, layout, stage * 2)
        one = stage_kept(actor.setting, stage, actor.tokens.trained)
        assert actor.tokens.microbatches > 8
        kept.append((actor.kept - one.head) / (one.chunks[0] + one.embedding + one.shared))
    assert kept == [4, 3, 2, 1]
    config, shape, _ = parts(SMALL, "parallel={pp: 4, vpp: 7}", "train.prompts_per_step=1024")
    (actor, *_) = rank_models(config, shape, make_layout(config.parallel, 8), 0)
    one = stage_kept(actor.setting, 0, actor.tokens.trained)
    assert actor.kept > 4 * sum(one.chunks)


def test_recomputation_keeps_less_and_works_more() -> None:
    config, shape, layout = parts(SMALL)
    kept = {}
    for way in ("none", "selective", "full"):
        memory = config.memory.model_copy(update={"recompute": way})
        kept[way] = stage_kept(Setting(shape, layout, config.parallel, memory, "bfloat16"), 0, 8192)
    assert kept["none"].chunks[0] > kept["selective"].chunks[0] > kept["full"].chunks[0]
    assert kept["none"].recomputed == 0 < kept["selective"].recomputed < kept["full"].recomputed
    assert kept["full"].chunks[0] == shape.num_layers * 2 * 8192 // layout.tp * shape.hidden_size


def test_a_critic_learns_beside_the_actor_s_weights() -> None:
    plan = phases(predict_memory(*parts(SMALL, "algorithm.name=ppo"), 80.0))
    names = list(plan)
    assert names.index("critic forward and backward") < names.index("forward and backward")
    assert plan["critic forward and backward"]["critic: gradients"] > 0


def test_what_does_not_fit_is_named_and_what_is_said_to_help_does() -> None:
    config, shape, layout = parts(SMALL, "train.tokens_per_microbatch=65536", "rollout.gpu_memory_fraction=0.3")
    plan = predict_memory(config, shape, layout, 80.0)
    assert plan.first_too_large is not None
    assert plan.first_too_large.name == "forward and backward"
    remedies = find_remedies(config, shape, layout, plan)
    assert len(remedies) == 3
    for remedy in remedies:
        changed = changed_config(config, dict(remedy.changes))
        again = predict_memory(changed, shape, make_layout(changed.parallel, changed.world_size), 80.0)
        assert again == remedy.plan
        assert again.first_too_large is None
        load_config(READY / SMALL, remedy.text.split())  # can be pasted
    assert find_remedies(config, shape, layout, remedies[0].plan) == []


def test_the_picture_says_what_the_plan_says() -> None:
    from rich.console import Console

    from rlhpc.cli.plan_memory import render_memory

    config, shape, layout = parts(SMALL, "train.tokens_per_microbatch=65536", "rollout.gpu_memory_fraction=0.3")
    plan = predict_memory(config, shape, layout, 80.0)
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_memory(plan, 80.0, find_remedies(config, shape, layout, plan)))
    text = capture.get()
    too_large = next(line for line in text.splitlines() if line.startswith("forward and backward"))
    assert f"{plan.peak / GIB:,.1f}" in too_large
    assert "|>" in too_large
    assert "DOES NOT FIT: forward and backward" in text
    assert text.count("fits with") == 3


def test_the_plan_of_the_worst_rank_is_of_the_worst_rank() -> None:
    config, shape, layout = parts(LARGE)
    plan = predict_memory(config, shape, layout, 141.0)
    each = layout.world_size // layout.pp
    peaks = [rank_memory(config, shape, layout, stage * each, 141.0).peak for stage in range(layout.pp)]
    assert plan.peak == max(peaks)


def test_671b_on_1024_gpus_is_planned_in_no_time() -> None:
    config, shape, layout = parts(
        LARGE, "slurm.nodes=128", "parallel={tp: 8, pp: 16, ep: 64, last_stage_layers: 1}", "rollout.tp=32"
    )
    began = time.perf_counter()
    plan = predict_memory(config, shape, layout, 141.0)
    assert time.perf_counter() - began < 0.5
    assert plan.peak > 0
