"""Plans of FSDP2 runs: phases, accumulation, remedies, and models by their files' headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription, ModelShape, TensorHeader, read_model
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import outline
from rlhpc.plan.estimates.fsdp_parameters import fsdp_state, parameter_groups
from rlhpc.plan.estimates.memory import GIB, Device, MemoryPlan, chosen_accumulation, predict_memory, rank_memory
from rlhpc.plan.estimates.run_time import checkpoint_bytes
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.mesh_sizes import MeshSizes
from rlhpc.sharding.shards import model_tensors

READY = Path(__file__).parents[3] / "configs" / "ready"
NAME = "qwen2.5-7b-1node"
SMALL = ("Qwen2.5-0.5B-Instruct", "Qwen2.5-7B")
LARGE = ("Qwen3-235B-A22B", "DeepSeek-V3")  # of 36,000 and 91,000 tensors
MESH = ("train.backend=fsdp", "actor.parallel={}")
REFUSED = ("deepseek-v3-671b-96gpus", "qwen3-235b-32gpus")  # AdamW on the CPU
NUMEL = 7_615_616_512  # of Qwen2.5-7B


def parts(*changes: str, name: str = NAME) -> tuple[RunConfig, ModelShape, ParallelLayout]:
    config = load_config(READY / f"{name}.yaml", [*MESH, *changes])
    shape = read_model(config.model.path)
    return config, shape, check_layout(config, config.slurm.most_nodes, shape)


def phases(plan: MemoryPlan) -> dict[str, dict[str, int]]:
    return {phase.name: phase.parts for phase in plan.phases}


def described(shape: ModelShape) -> ModelDescription:
    """The model as one of no known family, with the headers of its files."""
    headers = [TensorHeader(spec.name, spec.shape, "BF16") for spec in model_tensors(shape) if not spec.float32]
    names = set(ModelDescription.__dataclass_fields__) - {"tensors"}
    fields = {name: getattr(shape, name) for name in names}
    return ModelDescription(**fields, tensors=tuple(headers))


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_headers_have_the_parameters_of_the_family_s_table(name: str) -> None:
    """To the byte on every shard: expert by expert in files, stacked in memory."""
    shape = read_model(READY / "models" / name)
    known, found = parameter_groups(shape), parameter_groups(described(shape))
    for sizes in (MeshSizes(), MeshSizes(2, 3, 1), MeshSizes(1, 48, 2)):
        for rank in (0, sizes.world_size - 1):
            for optimizer in ("adamw", "muon", None):
                states = [fsdp_state(groups, sizes, rank, "bfloat16", optimizer) for groups in (known, found)]
                assert states[0] == states[1]
        assert known.largest_layer(sizes.shards).gathered(sizes.shards) == found.largest_layer(sizes.shards).gathered(
            sizes.shards
        )
    assert (known.tied, known.num_layers, known.numel) == (found.tied, shape.num_layers, found.numel)


def test_an_unknown_model_without_files_cannot_be_planned() -> None:
    with pytest.raises(UserError, match="by whose headers memory is planned"):
        parameter_groups(replace(described(read_model(READY / "models" / SMALL[0])), tensors=()))


def test_shards_are_master_weights_and_gradients_end_with_an_update() -> None:
    """By hand, on 8 ranks: 4 bytes of each parameter, of its gradient, and 8 of moments; padding is below a tenth of a
    percent."""
    config, shape, layout = parts("actor.memory.offload={}")
    found = phases(rank_memory(config, shape, layout, 0, Device(80.0)))
    eighth = NUMEL / 8
    update = found["forward and backward"]
    assert update["weights"] == pytest.approx(4 * eighth, rel=1e-3)
    assert update["gradients"] == update["weights"]
    assert update["optimizer"] == pytest.approx(8 * eighth, rel=1e-3)
    assert all("gradients" not in found[name] for name in ("load", "rollout", "log-probs", "save"))
    assert found["save"]["weights"] == update["weights"]


def test_state_in_cpu_memory_leaves_a_layer_at_a_time_on_the_gpu() -> None:
    """Weights and moments, 12 bytes of each parameter, and gradients in pinned memory of powers of two."""
    config, shape, layout = parts("actor.memory={cpu_offload: true}")
    found = phases(rank_memory(config, shape, layout, 0, Device(80.0)))
    there, shapes, layout = parts("actor.memory={offload: {}}")
    plain = phases(rank_memory(there, shapes, layout, 0, Device(80.0)))
    update, usual = found["forward and backward"], plain["forward and backward"]
    assert not {"weights", "gradients", "optimizer"} & update.keys()
    layer = 4 * (NUMEL - 2 * 152064 * 3584) / 28 / 8
    assert update["gathered weights"] - usual["gathered weights"] == pytest.approx(1.5 * layer, rel=0.01)
    cpu, before = (predict_memory(each, shape, layout, 80.0).cpu.parts for each in (config, there))
    gradients = cpu["state on the CPU"] - 12 * NUMEL / 8
    assert 4 * NUMEL / 8 < gradients < 8 * NUMEL / 8
    assert "state on the CPU" not in before
    assert cpu["checkpoint"] == before["checkpoint"]


def test_whole_gradients_wait_for_the_last_microbatch() -> None:
    """4 bytes of each parameter on every rank, only where there are several microbatches."""
    several, shape, layout = parts("actor.memory.accumulation=keep")
    kept = phases(rank_memory(several, shape, layout, 0, Device(80.0)))["forward and backward"]
    assert kept["unreduced gradients"] + kept["gradients"] == 4 * NUMEL
    one, *_ = parts("actor.memory.accumulation=keep", "train.tokens_per_microbatch=1000000")
    assert "unreduced gradients" not in phases(rank_memory(one, shape, layout, 0, Device(80.0)))["forward and backward"]


def test_layers_stay_gathered_without_resharding() -> None:
    usual, shape, layout = parts()
    whole, *_ = parts("actor.memory.reshard_after_forward=false")
    sizes = [
        phases(rank_memory(config, shape, layout, 0, Device(80.0)))["forward and backward"]["gathered weights"]
        for config in (usual, whole)
    ]
    layer = 2 * parameter_groups(shape).largest_layer(8).gathered(8)
    head = 2 * (shape.vocab_size + 1) * shape.hidden_size
    assert sizes[0] == pytest.approx(head + 3 * layer, rel=1e-3)
    assert sizes[1] == pytest.approx(2 * NUMEL + layer, rel=1e-3)


@pytest.mark.parametrize(("gpu", "expected"), [("b200", "keep"), ("h100", "reduce"), (None, "reduce")])
def test_gradients_are_kept_whole_where_the_gpu_holds_them(gpu: str | None, expected: str) -> None:
    named = ["slurm.gpu_type=null", f"planning.gpu={gpu or 'null'}"]
    config, shape, layout = parts(*named)
    assert chosen_accumulation(config, shape, layout) == expected
    for asked in ("keep", "reduce"):
        fixed, *_ = parts(*named, f"actor.memory.accumulation={asked}")
        assert chosen_accumulation(fixed, shape, layout) == asked


def test_copies_of_the_weights_take_more_memory() -> None:
    config, shape, layout = parts("slurm.nodes=2")
    copies, *_ = parts("slurm.nodes=2", "actor.parallel.dp_replicate=2")
    one, two = (
        phases(rank_memory(each, shape, layout, 0, Device(80.0)))["save"]["optimizer"] for each in (config, copies)
    )
    assert two == pytest.approx(2 * one, rel=1e-2)


def test_a_checkpoint_has_the_weights_once() -> None:
    config, shape, _ = parts()
    assert checkpoint_bytes(config, shape) == 12 * NUMEL


@pytest.mark.parametrize("file", sorted(READY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_configuration_is_planned_or_refused_in_a_line(file: Path) -> None:
    config = load_config(file, ["train.backend=fsdp", "actor.parallel={}"])
    shape = read_model(config.model.path)
    if file.stem in REFUSED:
        with pytest.raises(UserError, match=r"with train\.backend fsdp") as refused:
            outline(config)
        assert "\n" not in str(refused.value)
        return
    rows = dict(outline(config))
    assert rows["backend"] == "fsdp (train.backend)"
    plan = predict_memory(config, shape, check_layout(config, config.slurm.most_nodes, shape), 80.0)
    assert plan.peak > GIB
