"""What would stop a run after hours is refused or warned of, with key, value and remedy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.described import resolve_model
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape, Rope, read_model
from rlhpc.plan.checks import limits
from rlhpc.plan.checks.architecture import ProbeResult, check_results
from rlhpc.plan.checks.limits import (
    check_cache,
    check_cpu_memory,
    check_disk,
    check_lengths,
    check_limits,
    check_network,
    check_rope_tokens,
    check_tensor_parallel,
)
from rlhpc.plan.checks.run import check_config
from rlhpc.plan.estimates.hardware import GPUS, named_gpu, read_site
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.run_time import checkpoint_bytes, export_bytes
from rlhpc.sharding.layout import ParallelLayout, make_layout
from tests.helpers.machine import have_free_space
from tests.helpers.plain_model import write_inputs, write_model

READY = Path(__file__).parents[3] / "configs" / "ready"


def parts(*changes: str, name: str = "qwen2.5-7b-1node.yaml") -> tuple[RunConfig, ModelShape]:
    config = load_config(READY / name, changes)
    return config, read_model(config.model.path)


def test_lengths_may_reach_as_far_as_rope_scaling_does() -> None:
    config, shape = parts("data.max_prompt_tokens=1000", "rollout.max_response_tokens=99000")
    shape = replace(shape, max_positions=32768, rope=Rope(1e6))
    with pytest.raises(UserError) as caught:
        list(check_lengths(config, shape))
    assert str(caught.value) == (
        "rollout.max_response_tokens: 99000 response tokens after data.max_prompt_tokens 1000 exceed the model's 32768 "
        "positions (max_position_embeddings); lower them to 32768 together"
    )
    yarn = Rope(1e6, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768})
    (warning,) = check_lengths(config, replace(shape, rope=yarn))
    assert warning.startswith("rollout.max_response_tokens: 99000 after prompts of 1000")
    longer, _ = parts("data.max_prompt_tokens=1000", "rollout.max_response_tokens=131000")
    with pytest.raises(UserError, match=r"131072 with its rope scaling.*lower them to 131072 together"):
        list(check_lengths(longer, replace(shape, rope=yarn)))
    llama3 = Rope(5e5, "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    with pytest.raises(UserError, match="exceed the model's 32768"):
        list(check_lengths(config, replace(shape, rope=llama3)))


def test_dynamic_rope_reaches_beyond_the_models_positions_only_where_it_is_fixed(tmp_path: Path) -> None:
    """A known family and its back end too: fixed, it is default RoPE."""
    folder = write_model(tmp_path, model_type="qwen2")
    fields = json.loads((folder / "config.json").read_text())
    positions = fields["max_position_embeddings"]
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_theta": 1e4, "rope_parameters": None}
    (folder / "config.json").write_text(json.dumps({**fields, **dynamic}))

    def check(response: int, *changes: str) -> ModelDescription:
        lengths = ("data.max_prompt_tokens=8", f"rollout.max_response_tokens={response}")
        config = load_config(READY / "qwen2.5-7b-1node.yaml", [f"model.path={folder}", *lengths, *changes])
        check_rope_tokens(config)
        shape = resolve_model(config)
        assert not list(check_lengths(config, shape))
        return shape

    assert not isinstance(check(positions - 8), ModelShape)
    with pytest.raises(UserError) as caught:
        check(positions)
    message = f"lower them to {positions} together, or set model.rope_tokens to {positions + 8} at least"
    assert caught.value.where == "rollout.max_response_tokens"
    assert caught.value.remedy == message
    for backend in ("auto", "megatron", "fsdp"):
        shape = check(positions, f"model.rope_tokens={positions + 8}", f"train.backend={backend}")
        assert isinstance(shape, ModelShape)
        assert (shape.rope.kind, shape.max_positions) == ("default", positions + 8)
    with pytest.raises(UserError, match=f"lower them to {positions + 8} together, or raise model.rope_tokens"):
        check(positions + 1, f"model.rope_tokens={positions + 8}")
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"model.rope_tokens: 100, but the model has no dynamic RoPE; leave it out"):
        check(1, "model.rope_tokens=100")


def test_the_proofs_limit_counts_where_dynamic_rope_is_not_fixed() -> None:
    result = {"model.path": ProbeResult(works=True, longest=64)}
    config, _ = parts("data.max_prompt_tokens=32", "rollout.max_response_tokens=33")
    with pytest.raises(UserError, match=r"beyond 64 the rotary .*, or set model.rope_tokens"):
        check_results(config, result)
    fixed = config.model_copy(update={"model": config.model.model_copy(update={"rope_tokens": 65})})
    check_results(fixed, result)


def test_a_cache_without_room_for_one_sequence_is_refused() -> None:
    config, shape = parts("rollout.kv_cache_gib=0.05")
    with pytest.raises(UserError) as caught:
        list(check_cache(config, shape, None))
    message = str(caught.value)
    assert message.startswith("rollout.kv_cache_gib: 0.05 leaves a KV cache of")
    raised = re.search(r"; set it to ([\d.]+)", message)
    assert raised
    enough, _ = parts(f"rollout.kv_cache_gib={raised[1]}")
    assert len(list(check_cache(enough, shape, None))) == 1, "one, but not all that run at once"
    with pytest.raises(UserError, match=r"rollout.gpu_memory_utilization: 0.2 leaves a KV cache of 0 tokens"):
        list(check_cache(parts("rollout.gpu_memory_utilization=0.2")[0], shape, 40.0))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (["rollout.tp=1"], "set rollout.tp to 2 and rollout.gpu_memory_utilization to 0.88"),
        (["rollout.tp=1", "rollout.gpu_memory_utilization=1.0"], "set rollout.tp to 2 and rollout.gpu_memory_util"),
        (["rollout.tp=2"], "set it to 0.88 or set rollout.tp to 4"),
        (["rollout.tp=1", "resources.ranks_per_node=1", "slurm.nodes=1"], "take at least 2 GPUs (resources.ranks_per_"),
        (["rollout.tp=8", "rollout.kv_cache_gib=0.1"], "set it to 0.2 or lower rollout.max_response_tokens to 1597"),
    ],
)
def test_a_remedy_for_the_cache_helps(changes: list[str], remedy: str) -> None:
    """72B, of which one GPU of 80 GB holds not even the weights: each alternative is enough."""
    name = "qwen2.5-72b-96gpus.yaml"
    config, shape = parts(*changes, name=name)
    with pytest.raises(UserError) as caught:
        list(check_cache(config, shape, 79.6))
    assert remedy in caught.value.remedy
    for alternative in re.split(r", (?=set|lower)| or (?=set|lower)", caught.value.remedy):
        words = alternative.replace("set it", f"set {caught.value.where}")
        keys = [f"{key}={value}" for key, value in re.findall(r"(rollout\.\w+)(?: to |=)([\d.]+)", words)]
        gpus = re.search(r"at least (\d+) GPUs", words)
        keys += [f"resources.ranks_per_node={gpus[1]}"] if gpus else []
        changed, _ = parts(*changes, *keys, name=name)
        assert changed.world_size % changed.rollout.tp == 0
        assert keys
        assert changed.rollout.gpu_memory_utilization <= 0.95 or "gpu_memory_utilization" not in words
        list(check_cache(changed, shape, 79.6))


def test_no_remedy_for_the_cache_is_a_larger_gpu() -> None:
    """On a GPU of 8 GiB no number of ranks that divides 72B holds a sequence."""
    config, shape = parts("rollout.tp=8", "slurm.nodes=1", "actor.parallel.pp=1", name="qwen2.5-72b-96gpus.yaml")
    with pytest.raises(UserError) as caught:
        list(check_cache(config, replace(shape, num_heads=8, num_kv_heads=8), 8.0))
    assert caught.value.remedy == "use larger GPUs"


def test_a_full_share_of_the_gpu_is_not_to_be_raised() -> None:
    (warning,) = check_cache(*parts("rollout.gpu_memory_utilization=0.95", "rollout.max_response_tokens=20000"), 79.6)
    assert warning.endswith("Raise rollout.tp, or lower rollout.max_num_seqs")


def test_an_engine_beyond_the_gpu_is_not_to_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """140 GiB of weights have no room on any GPU of 80 GB, beside a trainer or not."""
    have_free_space(monkeypatch, 1 << 50)
    config, shape = parts("rollout.tp=1", "rollout.kv_cache_gib=4", name="qwen2.5-72b-96gpus.yaml")
    layout = make_layout(config.actor.parallel, config.world_size)
    (warning,) = [text for text in check_limits(config, shape, layout) if "free beside" in text]
    assert "offload more" not in warning
    assert "; set rollout.tp to 2; " in warning


def test_a_cache_for_a_part_of_the_batch_is_a_warning() -> None:
    config, shape = parts("rollout.kv_cache_gib=4")
    (warning,) = check_cache(config, shape, None)
    assert "rollout.kv_cache_gib: 4.0 leaves a KV cache for" in warning
    assert list(check_cache(parts("rollout.kv_cache_gib=900")[0], shape, None)) == []
    assert list(check_cache(parts()[0], shape, None)) == [], "nothing is known of the GPU"


def test_a_warning_on_engines_over_nodes_has_the_cost_of_the_network() -> None:
    def error_line(gpu: str | None, *changes: str, name: str = "qwen2.5-72b-96gpus.yaml") -> list[str]:
        config, shape = parts(*changes, name=name)
        site = read_site(config)
        return list(check_network(config, shape, named_gpu(config, site, gpu) if gpu else None, site.efficiency))

    assert error_line("h100", "rollout.tp=8") == error_line("gb200", "rollout.tp=16") == []
    what = "rollout.tp: engines of 16 ranks are on 2 nodes each, and every token crosses the network; "
    assert error_line(None, "rollout.tp=16") == [f"{what}set it to 8 at most if the model fits there"]
    (line,) = error_line("h100", "rollout.tp=16")
    found = re.fullmatch(
        rf"{what}set it to 8, with which a rollout is predicted to take (\d+) s instead of (\d+) s", line
    )
    assert found
    assert int(found[1]) < int(found[2])
    (line,) = error_line("h100", "rollout.tp=24")
    assert re.search(r"; set it to 8, with which a rollout is predicted to take \d+ s$", line), "24 do not suit it"
    (line,) = error_line("h20", name="deepseek-v3-671b-96gpus.yaml")
    assert line.endswith("no engine on one node of h20 holds the model: take nodes with the fastest network")


def test_a_disk_too_small_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = parts("checkpoint.keep=2")
    one = checkpoint_bytes(config, shape)
    assert 7.6e9 * 14 < one < 7.7e9 * 14
    for free, outcome in ((one // 2, "refused"), (2 * one, "warned"), (4 * one, "enough")):
        have_free_space(monkeypatch, free)
        if outcome == "refused":
            with pytest.raises(UserError, match=r"run_dir: a checkpoint takes 99.3 GiB, the disk of .* has 49.6 GiB"):
                list(check_disk(config, shape))
        else:
            warnings = list(check_disk(config, shape))
            assert len(warnings) == (outcome == "warned")
            assert all(warning.startswith("checkpoint.keep: 2 checkpoints") for warning in warnings)
    best, _ = parts("checkpoint.keep=2", "checkpoint.keep_best=reward_mean")
    have_free_space(monkeypatch, 3.5 * one)
    assert not list(check_disk(config, shape))
    (warning,) = check_disk(best, shape)
    assert warning.startswith("checkpoint.keep: 2 checkpoints, the best one and the one being written take 397.")


def test_a_disk_too_small_for_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes for each parameter, beside 14 of a checkpoint: one export, two or one for each checkpoint."""
    changes = ("checkpoint.keep=2", "checkpoint.export=hf", "checkpoint.keep_best=reward_mean")
    config, shape = parts(*changes)
    one, export = checkpoint_bytes(config, shape), export_bytes(config, shape)
    assert export * 7 == one
    assert export_bytes(parts("checkpoint.keep=2")[0], shape) == 0

    def warnings(free: float, at: str) -> list[str]:
        have_free_space(monkeypatch, free)
        return list(check_disk(parts(*changes, f"checkpoint.export_at={at}")[0], shape))

    for at, count in (("last", 1), ("best", 2), ("all", 4)):
        assert not warnings(4 * one + count * export, at)
        (warning,) = warnings(4 * one + count * export - 1, at)
        assert f"and the one being written, with {count} export(s), take " in warning
    with pytest.raises(UserError, match=r"run_dir: a checkpoint and its export take 113.5 GiB, the disk of"):
        warnings(one + export - 1, "last")


def test_a_checkpoint_holds_the_models_that_learn_and_what_a_warm_up_made() -> None:
    """By hand: 14 bytes for each parameter of actor and critic, 2 for the reference that the warm-up leaves."""
    config, shape = parts("algorithm.kl.coefficient=0")
    numel = checkpoint_bytes(config, shape) / 14
    warm = "sft={data: [a.jsonl], steps: 3}"
    for changes, each in (
        (["algorithm.name=ppo"], 28),
        (["algorithm.name=ppo", "train.steps=0", warm], 14),
        ([warm], 14),
        ([warm, "algorithm.kl.coefficient=0.1"], 16),
        ([warm, "algorithm.kl.coefficient=0.1", "train.steps=0"], 14),
        (["algorithm.kl.coefficient=0.1"], 14),
        (["model.dtype=float32"], 16),
        (["train.backend=fsdp"], 12),
        (["train.backend=fsdp", "algorithm.name=ppo"], 24),
    ):
        assert checkpoint_bytes(parts("algorithm.kl.coefficient=0", *changes)[0], shape) == each * numel, changes


def test_checks_tell_what_they_foresee(tmp_path: Path) -> None:
    """From the config alone: a GPU that is named, and an engine that leaves no room in it."""
    write_inputs(tmp_path)
    huge = ["planning.gpu=h200", "rollout.gpu_memory_utilization=1.0"]
    rows = check_config(load_config(tmp_path / "config.yaml", huge))
    message = [text for topic, text in rows if topic == "warning"]
    assert len(message) == 1
    assert message[0].startswith(
        "rollout.gpu_memory_utilization: at 1 an engine needs 140.4 GiB, and rank 0 has about "
    )
    assert not [text for topic, text in check_config(load_config(tmp_path / "config.yaml")) if topic == "warning"]


def test_an_engine_without_room_is_reported_with_the_value_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """7.6B on 8 ranks of 80 GB, nothing offloaded, at dp 8 and at dp 4."""
    have_free_space(monkeypatch, 1 << 50)
    kept = "actor.memory.offload={parameters: false, gradients: false, optimizer: false}"
    reference = "reference.memory.offload=false"
    share, cache = "rollout.gpu_memory_utilization", "rollout.kv_cache_gib"

    def reported(*changes: str) -> str:
        config, shape = parts("planning.gpu=h100", kept, reference, *changes)
        warnings = check_limits(config, shape, make_layout(config.actor.parallel, config.world_size))
        return next((line for line in warnings if "beside the trainer" in line), "")

    line = reported("actor.parallel.tp=1", f"{share}=0.6")
    assert line == (
        "rollout.gpu_memory_utilization: at 0.6 an engine needs 47.8 GiB, and rank 0 has about 10.7 free beside "
        "the trainer; offload more (actor.memory.offload); `rlhpc plan` shows what helps"
    ), "the engine's weights alone take 14.2"
    for key, value in ((share, 0.6), (cache, 40.0)):
        line = reported(f"{key}={value}")
        assert line.startswith(f"{key}: ")
        fits = float(line.partition("set it to ")[2].partition(" ")[0])
        assert 0.5 * value < fits < value
        assert not reported(f"{key}={fits}")
        assert reported(f"{key}={fits + 0.02}")


def test_tensor_parallelism_over_nodes_is_a_warning() -> None:
    config, _ = parts("slurm.nodes=2", "actor.parallel.tp=16")
    (warning,) = check_tensor_parallel(config, None)
    assert warning.startswith(
        "actor.parallel.tp: activations of every layer cross the network between 16 ranks on nodes of 8"
    )
    assert warning.endswith("use one of [1, 2, 4, 8], and pp for the rest")
    assert list(check_tensor_parallel(config, GPUS["gb200"])) == [], "72 of them are linked"
    assert list(check_tensor_parallel(parts("slurm.nodes=2", "actor.parallel.tp=8")[0], None)) == []
    config, shape = parts("slurm.nodes=2", "actor.parallel.tp=2", "train.steps=0", name="qwen2.5-0.5b-1gpu.yaml")
    assert warning.split()[:5] in [line.split()[:5] for line in check_limits(config, shape, ParallelLayout(2, tp=2))]


def test_too_little_cpu_memory_is_a_warning() -> None:
    config, shape = parts("slurm.memory=100G")
    layout = make_layout(config.actor.parallel, config.world_size)
    gpu = replace(GPUS["h100"], cpu_memory_gib=50.0)
    plan = predict_memory(config, shape, layout, gpu.memory_gib)
    (warning,) = check_cpu_memory(config, plan, gpu)
    assert warning.startswith("slurm.memory: ranks need about")
    assert "a node's memory, which has 100; raise it" in warning
    (warning,) = check_cpu_memory(parts()[0], plan, gpu)
    assert warning.startswith("site.gpus: ")
    assert list(check_cpu_memory(parts("slurm.memory=0")[0], plan, GPUS["h100"])) == []


def test_a_hosts_limit_is_what_a_node_needs_and_no_more() -> None:
    config, shape = parts()
    layout = make_layout(config.actor.parallel, config.world_size)
    plan = predict_memory(config, shape, layout, GPUS["h100"].memory_gib)
    needed = plan.cpu.node / 2**30
    assert list(check_cpu_memory(config, plan, replace(GPUS["h100"], cpu_memory_gib=needed * 1.001))) == []
    assert len(list(check_cpu_memory(config, plan, replace(GPUS["h100"], cpu_memory_gib=needed * 0.999)))) == 1


def test_a_run_is_warned_of_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    have_free_space(monkeypatch, 10**15)
    config, shape = parts("slurm.memory=100G")
    layout = make_layout(config.actor.parallel, config.world_size)
    assert [line for line in limits.check_limits(config, shape, layout) if line.startswith("slurm.memory: ranks need")]
    assert not [line for line in limits.check_limits(config, shape, layout, prepared=False) if "ranks need" in line]


def test_memory_measured_on_the_site_s_machines_counts(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text("gpus: {a100-40: {context_gib: 30}}\n")
    small = "qwen2.5-0.5b-1gpu.yaml"
    config, shape = parts("planning.gpu=a100-40", name=small)
    layout = make_layout(config.actor.parallel, config.world_size)
    refused = "rollout.gpu_memory_utilization: at 0."
    assert not [line for line in check_limits(config, shape, layout) if line.startswith(("memory: ", refused))]
    config, shape = parts("planning.gpu=a100-40", f"site.file={tmp_path}/gpus.yaml", name=small)
    assert [line for line in check_limits(config, shape, layout) if line.startswith(refused)]
