"""The search over both back ends: it names the faster one, and a layout of each that can be pasted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.models import read_model
from rlhpc.plan.back_ends import search_back_end, search_other_back_end
from rlhpc.plan.checks.backend import check_backend
from rlhpc.plan.checks.run import check_nodes
from rlhpc.plan.estimates.hardware import GPUS, named_gpu, read_site
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_other_model

ROOT = Path(__file__).parents[2]
NODE = ROOT / "configs" / "ready" / "qwen2.5-7b-1node.yaml"


@pytest.fixture(scope="module")
def printed() -> str:
    found = invoke("plan", "search", str(NODE), "--gpu", "h100")
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.heavy
def test_a_search_says_which_back_end_wins(printed: str) -> None:
    (line,) = (line for line in printed.splitlines() if line.startswith("# back end: "))
    assert line.startswith("# back end: megatron is 1.")
    assert line.endswith(" on 8 GPUs that train")
    assert printed.count("# fsdp: ") == 1
    assert "dp_replicate 1 x dp_shard 8 x cp 1" in printed


@pytest.mark.heavy
def test_the_other_back_end_s_layout_can_be_pasted(printed: str) -> None:
    """With its line of KEY=VALUE the configuration is valid, and as fast as printed."""
    block = printed.split("# fsdp: ")[1]
    overrides = block.splitlines()[1].removeprefix("# ").split()
    config = load_config(NODE, overrides)
    shape = read_model(config.model.path)
    check_backend(config, shape)
    layout = check_nodes(config, 1, shape)
    step = predict_step(config, shape, layout, GPUS["h100"], config.site.efficiency)
    assert block.startswith(f"{step.seconds:.1f} s a step")
    assert predict_memory(config, shape, layout, GPUS["h100"].memory_gib).first_too_large is None


def test_copies_of_the_weights_are_tried() -> None:
    """On two nodes with a slow network, a copy on each is the fastest."""
    config = load_config(NODE, ["train.backend=fsdp", "actor.parallel={}", "slurm.nodes=2"])
    slow = load_config(NODE, ["site.gpus={slow: {like: h100, network_gbps: 0.5}}", "planning.gpu=slow"])
    gpu = named_gpu(slow, read_site(slow))
    assert gpu is not None
    found = search_back_end(config, read_model(config.model.path), 16, gpu, config.site.efficiency, 1)
    (best,) = found.best
    assert best.fragment["actor"]["parallel"] == {"dp_replicate": 2}
    assert best.text == "dp_replicate 2 x dp_shard 8 x cp 1"


def test_what_the_other_back_end_refuses_is_named() -> None:
    config = load_config(ROOT / "configs/ready/qwen3-235b-32gpus.yaml", ["actor.moe.router_replay=true"])
    other = search_other_back_end(
        config, read_model(config.model.path), config.world_size, GPUS["h100"], config.site.efficiency
    )
    assert other.best is None
    assert other.reason.startswith("actor.moe.router_replay: true with train.backend fsdp")


def test_an_unknown_family_has_one_back_end(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path / "model")
    changes = [f"model.path={folder}", "actor.parallel={}", "data.max_prompt_tokens=56"]
    changes += ["rollout.max_response_tokens=200", "planning.prompt_tokens=40", "planning.response_tokens=100"]
    found = invoke("plan", "search", str(NODE), *changes, "--gpu", "h100")
    assert found.exit_code == 0, found.output
    assert "# back end: fsdp; none with megatron (the model is of no known family)" in found.output
    planned = invoke("plan", "run", str(NODE), *changes, "--gpu", "h100")
    assert planned.exit_code == 0, planned.output
    assert "activations by a bound for any architecture; `rlhpc plan measure` measures this one's" in planned.output


def test_json_names_the_back_end_of_each_result() -> None:
    small = ROOT / "configs" / "ready" / "qwen2.5-0.5b-1gpu.yaml"
    found = invoke("plan", "search", str(small), "--gpu", "h100", "--json")
    assert found.exit_code == 0, found.output
    assert {one["backend"] for one in json.loads(found.output)} == {"megatron", "fsdp"}
