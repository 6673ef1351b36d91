"""Memory by phase: what is let go is gone, what does not fit is named, and what is said to help does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import OffloadSection
from rlhpc.models import ModelShape, read_model, shape_of
from rlhpc.plan.estimates import activations
from rlhpc.plan.estimates.activations import ActivationSetting, stage_activations
from rlhpc.plan.estimates.hardware import Reserves
from rlhpc.plan.estimates.memory import (
    GIB,
    Device,
    MemoryPlan,
    engine_bytes,
    engine_memory,
    engine_numel,
    kv_bytes_per_token,
    predict_memory,
    rank_memory,
    sequence_tokens,
)
from rlhpc.plan.estimates.model_memory import rank_models
from rlhpc.plan.estimates.rank_memory import LocalParameter, default_bucket, lay_out, state_bytes
from rlhpc.plan.remedies import find_remedy
from rlhpc.plan.scenario import changed_config, make_scenario
from rlhpc.sharding.engine_shards import EngineLayout, engine_parameters
from rlhpc.sharding.layout import ParallelLayout, make_layout
from rlhpc.sharding.shards import model_tensors
from tests.helpers.published import MIXTRAL_8X7B

READY = Path(__file__).parents[3] / "configs" / "ready"
SMALL, LARGE = "qwen2.5-7b-1node.yaml", "deepseek-v3-671b-96gpus.yaml"
EVERYTHING = (
    "actor.memory.offload={parameters: true, gradients: true, optimizer: true}",
    "reference.memory.offload=true",
)
STAYS = "reference.memory.offload=false"
MODELS = sorted(path for path in (READY / "models").iterdir() if path.is_dir())


def parts(name: str, *changes: str) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / name, changes)
    return config, read_model(config.model.path), make_layout(config.actor.parallel, config.world_size)


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
    """By hand: keys and values of 4 heads of 128 in 28 layers; one vector of 576 in 61 layers at any tp."""
    _, dense, _ = parts(SMALL)
    _, latent, _ = parts(LARGE)
    assert kv_bytes_per_token(dense, 1, "bfloat16") == 2 * 28 * 2 * 4 * 128
    assert kv_bytes_per_token(dense, 2, "bfloat16") == 28 * 2 * 4 * 128
    assert kv_bytes_per_token(dense, 8, "bfloat16") == 2 * 28 * 2 * 128
    assert kv_bytes_per_token(latent, 8, "bfloat16") == 2 * 61 * 576


def test_the_engine_takes_its_share_and_no_more() -> None:
    config, shape, _ = parts(SMALL, "rollout.max_num_seqs=200")
    engine = engine_memory(config, shape, 80 * GIB)
    share = int(config.rollout.gpu_memory_utilization * 80 * GIB)
    assert engine.weights + engine.working + engine.cache == share
    unknown = engine_memory(config, shape, None)
    assert unknown.tokens == 200 * sequence_tokens(config)


def test_an_engine_s_passes_hold_what_a_token_s_experts_make() -> None:
    """By hand: 8192 tokens of two experts of 14336 each, over four ranks, and the logits of 256."""
    config, *_ = parts(SMALL, "rollout.tp=4", "rollout.max_num_seqs=256")
    engine = engine_bytes(config.rollout, shape_of(MIXTRAL_8X7B), "bfloat16", None)
    assert engine.working == 2 * 8192 * (4 * 4096 + 3 * 2 * 14336 // 4) + 8 * 256 * 32000


def test_a_model_that_guesses_is_in_the_engine_and_its_cache(tmp_path: Path) -> None:
    """By hand: Mixtral's fields in its folder, of which each rank of two has a half; its weights are on the CPU too."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    guesses = f"rollout.speculative={{method: draft_model, model: {tmp_path}}}"
    (alone, shape, layout), (config, *_) = parts(SMALL, "rollout.tp=2"), parts(SMALL, "rollout.tp=2", guesses)
    without, found = (engine_bytes(one.rollout, shape, "bfloat16", None, 1000) for one in (alone, config))
    draft = 2 * engine_numel(shape_of(MIXTRAL_8X7B), EngineLayout(2))
    assert found.weights - without.weights == draft
    assert found.token - without.token == 32 * 2 * 4 * 128 * 2
    assert found.cache == 1000 * found.token
    cpu = rank_memory(config, shape, layout, 0).cpu
    assert cpu.parts["draft model"] == draft
    assert "draft model" not in rank_memory(alone, shape, layout, 0).cpu.parts


def test_buffers_by_hand() -> None:
    """Places are multiples of 64, ends of 128 and of the ranks; the last parameter comes first."""
    given = [LocalParameter("a", 100), LocalParameter("b", 30), LocalParameter("c", 65, shared=True)]
    one = lay_out(given, ranks=3)
    assert one.places == ((0, 65), (384, 414), (448, 548))
    assert one.buckets == ((0, 384), (384, 768))
    assert one.owned(3, 0) == [(given[2], 65), (given[1], 30), (given[0], 64)]
    assert one.owned(3, 1) == [(given[0], 36)]
    small = lay_out([LocalParameter(name, 100) for name in "abc"], ranks=1, bucket=150)
    assert small.buckets == ((0, 256), (256, 384))


def test_what_is_let_go_is_away_while_the_engine_generates() -> None:
    config, shape, layout = parts(SMALL, *EVERYTHING)
    away = phases(rank_memory(config, shape, layout, 0, Device(80.0)))
    kept = phases(
        rank_memory(
            changed_config(config, {"actor.memory.offload": OffloadSection(), "reference.memory.offload": False}),
            shape,
            layout,
            0,
            Device(80.0),
        )
    )
    state = state_bytes(shape, layout, 0, "bfloat16", bucket=40_000_000)
    assert kept["rollout"]["weights"] == state.parameters
    assert kept["rollout"]["gradients"] == state.gradients
    assert kept["rollout"]["optimizer"] == state.optimizer
    assert not {"weights", "gradients", "optimizer", "reference: weights"} & away["rollout"].keys()
    assert away["weight sync"]["weights"] == state.parameters, "what is synced stays until it has been"
    assert away["forward and backward"]["gradients"] == state.gradients
    assert "reference: weights" in away["log-probs"]
    assert "reference: weights" not in away["forward and backward"]


def test_a_reward_model_judges_while_the_actor_is_away() -> None:
    own = f"rewards=[{{model: {READY / 'models' / 'Qwen2.5-3B-Instruct'}}}]"
    given = parts(SMALL, own, *EVERYTHING)
    found = phases(rank_memory(*given, 0, Device(80.0)))
    assert {what for what in found["reward model"] if "weights" in what} == {"reward model: weights"}
    assert {what for what in found["log-probs"] if "weights" in what} == {"weights", "reference: weights"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], ["load", "weight sync", "rollout"]),
        (["data.validation=[]"], ["load"]),
        (
            ["data.validation=[]", "sft={data: [a.jsonl], steps: 3}"],
            ["load", "forward and backward", "optimizer step", "save"],
        ),
    ],
)
def test_without_rl_steps_nothing_is_judged(changes: list[str], names: list[str]) -> None:
    assert list(phases(rank_memory(*parts(SMALL, "train.steps=0", *changes), 0, Device(80.0)))) == names


def test_a_rank_s_state_has_a_gpu_s_buckets() -> None:
    """On 24 ranks buckets have ends that are multiples of 3 too: several take more than one for all."""
    config, shape, layout = parts(SMALL, "slurm.nodes=3")
    state = rank_models(config, shape, layout, 0)[0].state
    assert state == state_bytes(shape, layout, 0, "bfloat16", bucket=default_bucket(layout))
    assert state.parameters > state_bytes(shape, layout, 0, "bfloat16").parameters


def test_a_model_loads_into_its_buffers() -> None:
    """On 64 ranks a second copy of the weights would be larger than the optimizer's part."""
    warm_up = ["train.steps=0", "data.validation=[]", "sft={data: [a.jsonl], steps: 3}"]
    plan = phases(rank_memory(*parts(SMALL, "slurm.nodes=8", *warm_up), 0, Device(80.0)))
    assert plan["save"]["weights"] > plan["save"]["optimizer"]
    assert plan["load"] == {what: plan["save"][what] for what in ("weights", "gradients", "optimizer", "libraries")}


def test_the_engine_finds_its_share_of_the_gpu_free_when_it_starts() -> None:
    """It starts before the models, and wakes beside state that is not offloaded."""
    share = "rollout.gpu_memory_utilization=0.95"
    whole = int(0.95 * 80 * GIB) + Reserves().context
    for offload in (EVERYTHING, (STAYS, "actor.memory.offload={gradients: true, optimizer: true}")):
        config, shape, layout = parts(SMALL, share, *offload)
        load, _, rollout, *_ = rank_memory(config, shape, layout, 0, Device(80.0)).phases
        state = state_bytes(shape, layout, 0, "bfloat16", bucket=40_000_000)
        assert load.total == whole
        assert rollout.parts.get("weights", 0) == (0 if offload is EVERYTHING else state.parameters)
        assert not {"gradients", "optimizer"} & rollout.parts.keys()


def test_an_engine_sleeps_while_the_models_load() -> None:
    """7.6B on one GPU, nothing offloaded, and an engine with a cache for 512 sequences: a load needs no more than an
    update, a rollout both sides at once."""
    kept = ["actor.memory.offload={parameters: false, gradients: false, optimizer: false}", STAYS]
    one = ["resources.ranks_per_node=1", "actor.parallel.tp=1", "rollout.max_num_seqs=512"]
    config, shape, layout = parts(SMALL, *kept, *one, "algorithm.kl.coefficient=0")
    plan = rank_memory(config, shape, layout, 0, Device(None))
    size = {phase.name: phase.total for phase in plan.phases}
    load = phases(plan)["load"]
    assert load["optimizer"] == phases(plan)["optimizer step"]["optimizer"]
    assert load["engine, asleep"] == Reserves().sleeping_engine
    assert size["load"] == size["optimizer step"] < size["forward and backward"]
    awake = engine_memory(config, shape, None)
    assert size["rollout"] == size["load"] - Reserves().sleeping_engine + awake.weights + awake.working + awake.cache


def test_a_save_takes_nothing_of_the_gpu_and_of_the_host_what_the_rank_writes() -> None:
    """By hand: 12 bytes for each parameter that the rank updates, 2 for those weights that it writes for its group."""
    config, shape, layout = parts(SMALL, "actor.parallel.tp=2", "algorithm.kl.coefficient=0")
    plan = rank_memory(config, shape, layout, 0)
    assert phases(plan)["save"] == phases(plan)["optimizer step"]
    numel = sum(prod(spec.shape) for spec in model_tensors(shape))
    assert plan.cpu.parts["checkpoint"] == pytest.approx((12 + 2) * numel / 8, rel=1e-2)
    on_cpu = changed_config(config, {"actor.optimizer.optimizer_offload_fraction": 1.0})
    assert rank_memory(on_cpu, shape, layout, 0).cpu.parts["checkpoint"] == plan.cpu.parts["checkpoint"]
    full = changed_config(config, {"model.dtype": "float32"})
    assert rank_memory(full, shape, layout, 0).cpu.parts["checkpoint"] == pytest.approx(16 * numel / 8, rel=1e-2)


def test_logits_of_a_pass_are_taken_apart_in_float32() -> None:
    """By hand: 200 tokens of half the padded vocabulary of 152064, in bfloat16, and a part three times in float32."""
    short = [
        "data.max_prompt_tokens=100",
        "rollout.max_response_tokens=100",
        "train.log_prob_tokens_per_microbatch=200",
    ]
    config, shape, layout = parts(SMALL, "actor.parallel.tp=2", *short)
    assert rank_models(config, shape, layout, 0)[0].forward_peak == 200 * 152064 // 2 * 2 + 3 * 4 * 2**23


def test_a_fraction_goes_gradients_first() -> None:
    config, shape, layout = parts(
        SMALL, STAYS, "actor.memory.offload={gradients: true, optimizer: true, fraction: 0.5}"
    )
    actor = rank_models(config, shape, layout, 0)[0]
    state, left = actor.state, actor.idle_state
    assert left.gradients == 0
    gone = state.gradients + state.optimizer - left.gradients - left.optimizer
    assert gone == max(state.gradients, (state.gradients + state.optimizer) // 2)


def test_stages_hold_the_microbatches_in_flight() -> None:
    """1F1B: the first of four stages holds four, the last one; interleaved stages hold more."""
    config, shape, _ = parts(SMALL, "actor.parallel={pp: 4}", "train.prompts_per_step=1024")
    layout = make_layout(config.actor.parallel, 8)
    kept = []
    for stage in range(4):
        (actor, *_) = rank_models(config, shape, layout, stage * 2)
        one = stage_activations(actor.setting, stage, actor.tokens.trained)
        assert actor.tokens.microbatches > 8
        kept.append((actor.stored - one.head) / (one.chunks[0] + one.embedding + one.shared))
    assert kept == [4, 3, 2, 1]
    config, shape, _ = parts(SMALL, "actor.parallel={pp: 4, vpp: 7}", "train.prompts_per_step=1024")
    (actor, *_) = rank_models(config, shape, make_layout(config.actor.parallel, 8), 0)
    one = stage_activations(actor.setting, 0, actor.tokens.trained)
    assert actor.stored > 4 * sum(one.chunks)


def test_recomputation_keeps_less_and_works_more() -> None:
    config, shape, layout = parts(SMALL)
    kept = {}
    for way in ("none", "selective", "full"):
        memory = config.actor.memory.model_copy(update={"recompute": way})
        kept[way] = stage_activations(
            ActivationSetting(shape, layout, config.actor.parallel, memory, "bfloat16"), 0, 8192
        )
    assert kept["none"].chunks[0] > kept["selective"].chunks[0] > kept["full"].chunks[0]
    assert kept["none"].recomputed == 0 < kept["selective"].recomputed < kept["full"].recomputed
    assert kept["full"].chunks[0] == shape.num_layers * 2 * 8192 // layout.tp * shape.hidden_size


def test_a_critic_learns_beside_the_actor_s_weights() -> None:
    plan = phases(predict_memory(*parts(SMALL, "algorithm.name=ppo"), 80.0))
    names = list(plan)
    assert names.index("critic forward and backward") < names.index("forward and backward")
    assert plan["critic forward and backward"]["critic: gradients"] > 0


def test_routed_experts_of_a_step_are_in_the_host_s_memory() -> None:
    """By hand: a byte for each of 8 experts in 58 layers of a token; 96 ranks, 8 of a node, engines of 32 and of 4."""
    config, shape, layout = parts(LARGE)
    assert "routed_experts" not in rank_memory(config, shape, layout, 0).cpu.parts
    tokens = config.train.prompts_per_step * config.rollout.samples_per_prompt * sequence_tokens(config)
    whole = tokens * 58 * 8
    for tp, drawn in ((32, whole / 3 / 8), (4, whole / 24 * 2 / 8)):
        replayed = changed_config(config, {"actor.moe.router_replay": True, "rollout.tp": tp})
        held = drawn + 3 * whole / (layout.dp * layout.pp)
        assert rank_memory(replayed, shape, layout, 0).cpu.parts["routed_experts"] == pytest.approx(held)


def test_kept_tokens_of_a_step_are_in_the_host_s_memory() -> None:
    """By hand: four bytes for each of the top_k of a response's token, of all responses on every rank."""
    config, shape, layout = parts(LARGE)
    responses = config.train.prompts_per_step * config.rollout.samples_per_prompt
    whole = 4 * responses * config.rollout.max_response_tokens
    for top_k, held in ((20, 20 * whole), (512, 512 * whole), (513, 0)):
        cut = changed_config(config, {"rollout.sampling.top_k": top_k})
        assert rank_memory(cut, shape, layout, 0).cpu.parts.get("kept tokens", 0) == held


def test_too_little_cpu_memory_is_reported() -> None:
    from rlhpc.cli.plan_run import memory_json, render_memory

    config, shape, layout = parts(SMALL)
    plan = predict_memory(config, shape, layout, 80.0)
    for gib, fits in ((plan.cpu.node / GIB - 1, False), (plan.cpu.node / GIB + 1, True)):
        limit = ("slurm.memory", gib * GIB)
        text = [str(line) for line in render_memory(plan, 80.0, cpu_memory_limit=limit).renderables]
        assert any(f"{plan.cpu.node / GIB:,.1f} of {gib:,.1f} GiB a node" in line for line in text)
        start = "DOES NOT FIT: a node needs 1.0 GiB of CPU memory more than slurm.m"
        assert len([line for line in text if line.startswith(start)]) == (0 if fits else 1)
        assert memory_json(plan, limit)["cpu"]["limit"] == gib * GIB


def test_the_plan_of_the_worst_rank_is_of_the_worst_rank() -> None:
    config, shape, layout = parts(LARGE)
    plan = predict_memory(config, shape, layout, 141.0)
    each = layout.world_size // layout.pp
    peaks = [rank_memory(config, shape, layout, stage * each, Device(141.0)).peak for stage in range(layout.pp)]
    assert plan.peak == max(peaks)


def test_671b_on_1024_gpus_is_planned_in_no_time() -> None:
    config, shape, layout = parts(
        LARGE, "slurm.nodes=128", "actor.parallel={tp: 8, pp: 16, ep: 64, last_stage_layers: 1}", "rollout.tp=32"
    )
    began = time.process_time()
    plan = predict_memory(config, shape, layout, 141.0)
    assert time.process_time() - began < 0.5
    assert plan.peak > 0


def test_a_last_microbatch_that_is_not_full_is_in_flight_too() -> None:
    """Three samples of the longest on a rank, of which a microbatch takes two: two microbatches, not one."""
    longest = "data.max_prompt_tokens=512"
    config, shape, _ = parts(
        SMALL,
        longest,
        "rollout.max_response_tokens=1536",
        "actor.parallel={pp: 2, tp: 4}",
        "train.prompts_per_step=3",
        "rollout.samples_per_prompt=1",
        "train.minibatches=1",
        "train.tokens_per_microbatch=4096",
    )
    (actor, *_) = rank_models(config, shape, make_layout(config.actor.parallel, 8), 0)
    assert actor.tokens.microbatches == 2


def test_what_a_machine_keeps_is_in_every_phase_and_in_the_remedy() -> None:
    config, shape, layout = parts(SMALL)
    measured = Reserves(context=3 * GIB, sleeping_engine=2 * GIB)
    estimated, plan = (predict_memory(config, shape, layout, 80.0, reserves) for reserves in (Reserves(), measured))
    more = {after.name: after.total - before.total for before, after in zip(estimated.phases, plan.phases, strict=True)}
    awake = {"load", "weight sync", "rollout"}  # in this plan an engine that starts needs more than models that load
    assert {name: size / GIB for name, size in more.items()} == {name: 1.5 + (name not in awake) for name in more}
    assert {phase.parts["libraries"] for phase in plan.phases} == {3 * GIB}
    gib = plan.peak / GIB + 0.1
    assert predict_memory(config, shape, layout, gib, Reserves()).first_too_large is None
    case = make_scenario(config)
    assert case is not None
    remedy = find_remedy(replace(case, gpu=replace(case.gpu, memory_gib=gib, context_gib=8.0)))
    assert remedy is not None
    assert {phase.parts["libraries"] for phase in remedy.memory.phases} == {8 * GIB}


def test_the_heads_blocks_are_those_of_a_gpu() -> None:
    from rlhpc.backends.kernels import loss_head

    assert activations.BLOCK_BYTES == loss_head.BLOCK_BYTES_GPU
    assert activations.MIN_COLUMNS == loss_head.MIN_COLUMNS
    assert activations.CHUNK_ELEMENTS == loss_head.CHUNK_ELEMENTS_GPU
