"""Which back end a run has, its mesh, and the keys that only the other one has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.described import resolve_backend, resolve_model
from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape
from rlhpc.plan.checks.architecture import TRAINER, ProbeResult
from rlhpc.plan.checks.run import check_config, outline
from tests.helpers.plain_model import write_inputs, write_model, write_other_inputs

FSDP = "train.backend=fsdp"
CRITIC = ["algorithm.name=ppo", "resources.ranks_per_node=4"]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return write_inputs(tmp_path, model_type="qwen2")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The config of a run with an OLMo 2."""
    return write_other_inputs(tmp_path)


def summary(config: Path, *overrides: str) -> dict[str, str]:
    return dict(check_config(load_config(config, overrides)))


def refused(config: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_config(load_config(config, overrides))
    return str(caught.value)


def test_the_family_decides_unless_the_configuration_does(known: Path) -> None:
    assert summary(known)["backend"] == "megatron, for the known family qwen2"
    assert summary(known, FSDP)["backend"] == "fsdp (train.backend)"
    assert isinstance(resolve_model(load_config(known, [FSDP])), ModelShape)  # planned by its table
    assert resolve_backend(load_config(known, [FSDP])) == "fsdp"


def test_an_unknown_family_trains_on_fsdp(other: Path) -> None:
    found = summary(other, "resources.ranks_per_node=4", "actor.parallel={cp: 2, dp_replicate: 2}")
    assert found["backend"] == "fsdp: no family for megatron (architecture 'Olmo2ForCausalLM' is not supported)"
    assert "training dp_replicate 2 x dp_shard 1 x cp 2 (ulysses: each of 2 ranks takes 2 of 4" in found["layout"]
    assert "Olmo2ForCausalLM, 2 layers, hidden 64, 0.1 M parameters in 1 file(s)" in found["model"]
    assert dict(outline(load_config(other)))["backend"] == summary(other)["backend"]
    assert resolve_backend(load_config(other)) == "fsdp"
    line = refused(other, "train.backend=megatron")
    assert "'Olmo2ForCausalLM' is not supported; " in line
    assert line.endswith("or use train.backend fsdp")


def test_a_feature_that_the_family_lacks_is_the_reason(known: Path) -> None:
    file = known.parent / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_sliding_window": True, "sliding_window": 64}))
    assert "use_sliding_window = True is not supported" in summary(known)["backend"]
    assert "or use train.backend fsdp" in refused(known, "train.backend=megatron")


def test_heads_that_cp_does_not_divide_gather_keys_and_values(tmp_path: Path) -> None:
    config = write_other_inputs(tmp_path, num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    ranks = ["resources.ranks_per_node=2", "actor.parallel.cp=2"]
    assert "(all-gather: 3 query heads cannot be divided among 2 ranks)" in summary(config, *ranks)["layout"]
    assert refused(config, *ranks, "actor.parallel.cp_method=ulysses") == (
        "actor.parallel.cp: 2 does not divide the model's 3 attention heads, as cp_method ulysses needs; set cp_method "
        "to auto"
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["actor.parallel.tp=2", "resources.ranks_per_node=2"],
            "actor.parallel.tp: 2 with train.backend fsdp, which shards over dp_replicate and cp alone; leave it out, "
            "or use train.backend megatron",
        ),
        (
            ["actor.parallel.dp_replicate=2", "resources.ranks_per_node=3"],
            "actor.parallel: dp_replicate 2 x cp 1 = 2 ranks does not divide the 3 ranks of the job "
            "(slurm.nodes x resources.ranks_per_node); use sizes whose product is one of [1, 3]",
        ),
        (["actor.parallel.sequence_parallel=false"], "actor.parallel.sequence_parallel: false with train.backend fsdp"),
        (
            ["actor.moe.aux_loss=0.1"],
            "actor.moe.aux_loss: 0.1 with train.backend fsdp, whose routers are",
        ),
        (["actor.moe.bias_update_rate=0.1"], "actor.moe.bias_update_rate: 0.1 with train.backend fsdp"),
        (["actor.moe.router_dtype=float32"], "actor.moe.router_dtype: float32 with train.backend fsdp"),
        (["actor.moe.router_replay=true"], "actor.moe.router_replay: true with train.backend fsdp"),
        (
            ["actor.optimizer.optimizer_offload_fraction=0.5"],
            "actor.optimizer.optimizer_offload_fraction: 0.5 with train.backend fsdp, which updates on the GPU; leave "
            "it out, and set actor.memory.offload.optimizer",
        ),
        (
            ["actor.memory={recompute: full, recompute_layers: 2}"],
            "actor.memory.recompute_layers: groups of 2 layers with train.backend fsdp",
        ),
        ([*CRITIC, "critic.parallel.pp=2"], "critic.parallel.pp: the critic: 2 with train.backend fsdp"),
        ([*CRITIC, "critic.moe.aux_loss=0.1"], "critic.moe.aux_loss: 0.1 with train.backend fsdp"),
        ([*CRITIC, "critic.optimizer.optimizer_offload_fraction=1"], "critic.optimizer.optimizer_offload_fraction: 1 "),
    ],
)
def test_keys_of_megatron_are_refused(known: Path, overrides: list[str], line: str) -> None:
    assert line in refused(known, FSDP, *overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["actor.parallel.dp_replicate=2", "resources.ranks_per_node=2"], "actor.parallel.dp_replicate: 2 with train"),
        (["train.compile=blocks"], "train.compile: blocks with train.backend megatron; set it to functions, or use"),
        (["actor.memory.reshard_after_forward=false"], "actor.memory.reshard_after_forward: false with train.backend"),
        (["actor.memory.accumulation=keep"], "actor.memory.accumulation: keep with train.backend megatron; leave it"),
        (["actor.memory.cpu_offload=true"], "actor.memory.cpu_offload: true with train.backend megatron; leave it out"),
    ],
)
def test_keys_of_fsdp_are_refused(known: Path, overrides: list[str], line: str) -> None:
    assert line in refused(known, *overrides)
    summary(known, FSDP, *overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["actor.memory={cpu_offload: true, offload: {optimizer: true, gradients: true}}"],
            "actor.memory.cpu_offload: true, and offload.gradients, offload.optimizer too, whose tensors it keeps in",
        ),
        (
            ["actor.memory.cpu_offload=true", "reshard.share_weights=true"],
            "reshard.share_weights: true with train.backend fsdp, whose weights are in CPU memory (actor.memory.",
        ),
        (
            ["reshard.share_weights=true", "model.dtype=bfloat16"],
            "share_weights: true with train.backend fsdp, whose w",
        ),
        (
            [*CRITIC, "critic.memory={cpu_offload: true, offload: {parameters: true}}"],
            "critic.memory.cpu_offload: true",
        ),
    ],
)
def test_state_in_cpu_memory_is_neither_offloaded_nor_shared(known: Path, overrides: list[str], line: str) -> None:
    assert line in refused(known, FSDP, *overrides)


def test_no_remedy_names_megatron_for_a_model_that_it_cannot_train(other: Path) -> None:
    for overrides in (["actor.parallel.tp=2", "resources.ranks_per_node=2"], ["actor.moe.aux_loss=0.1"]):
        assert refused(other, *overrides).endswith("; leave it out")


def test_models_beside_the_actor_share_its_back_end(other: Path) -> None:
    reward = write_model(other.parent / "reward", architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    critic = [*CRITIC, f"critic.path={reward}", "critic.parallel.cp=2"]
    assert "critic dp_replicate 1 x dp_shard 2 x cp 2" in summary(other, *critic)["layout"]
    known = write_inputs(other.parent / "known", model_type="qwen2")
    line = refused(known, *CRITIC, f"critic.path={other.parent / 'model'}")
    assert "'Olmo2ForCausalLM' is not supported" in line
    assert "or use train.backend fsdp" in line
    summary(known, *CRITIC, f"critic.path={other.parent / 'model'}", FSDP)


def test_engines_divide_the_heads_of_any_model(other: Path) -> None:
    line = refused(other, "resources.ranks_per_node=3", "rollout.tp=3")
    assert line.startswith("rollout.tp: 3 does not divide the model's 4 attention heads")


def test_a_check_of_an_unknown_family_imports_no_torch(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.XDG_CACHE_HOME, str(other.parent / "cache"))
    proof = TRAINER.file(other.parent / "model")
    proof.parent.mkdir(parents=True)
    proof.write_text(json.dumps(ProbeResult(works=True).as_json()))
    program = (  # as on a login node, which asks no vLLM; to import it is an error
        "import sys\nsys.modules['vllm'] = None\nfrom rlhpc.cli.main import cli\n"
        f"cli(['run', {str(other)!r}, '--check'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "backend fsdp: no family for megatron" in done.stdout
