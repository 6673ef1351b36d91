"""The remedy for a plan that does not fit: it fits, can be pasted, and changes no more than it must."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace

import pytest

from rlhpc.cli.plan_run import render_memory
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.core.terminal import Terminal
from rlhpc.plan.estimates.memory import GIB
from rlhpc.plan.remedies import find_remedy
from rlhpc.plan.scenario import Scenario, differences, make_scenario
from rlhpc.plan.search import fastest
from tests.plan.estimates.test_memory import READY, SMALL

HALVES = ("placement=separate", "rollout.ranks=4")
MESH = ("train.backend=fsdp", "actor.parallel={}")
GATHERED = (
    "actor.memory.accumulation=keep",
    "actor.memory.reshard_after_forward=false",
    "actor.memory.recompute=full",
)
SEVENTY = "qwen2.5-72b-96gpus.yaml"
LONG = (
    *("data.max_prompt_tokens=1024", "rollout.max_response_tokens=64512", "train.tokens_per_microbatch=65536"),
    *("actor.parallel={tp: 2}", "actor.memory.offload.parameters=true", "rollout.gpu_memory_utilization=0.4"),
)
ON_CPU = "actor.optimizer.optimizer_offload_fraction=1.0"
SFT = ("train.steps=0", "sft={data: [a.jsonl], steps: 1}")
# Configuration, GiB of a GPU, changes.
MISFITS = [
    (SMALL, 80.0, ("train.tokens_per_microbatch=65536", "rollout.gpu_memory_utilization=0.3")),
    *((SMALL, gib, ()) for gib in (20.0, 28.0, 36.0)),
    (SMALL, 24.0, ("rollout.tp=2",)),
    (SMALL, 79.6, ("rollout.gpu_memory_utilization=0.95",)),
    (SMALL, 79.6, ("placement=lend", "rollout.ranks=4", "rollout.gpu_memory_utilization=0.95")),
    (SMALL, 40.0, (*HALVES, "rollout.gpu_memory_utilization=0.9")),
    (SMALL, 54.0, (*LONG, "actor.memory.recompute=none")),
    (SMALL, 20.0, MESH),
    (SMALL, 79.6, (*SFT, "slurm.memory=100G")),
    ("qwen2.5-3b-1gpu.yaml", 24.0, ()),
    ("qwen2.5-7b-2nodes-separate.yaml", 24.0, ()),
    (SEVENTY, 79.6, ("rollout.tp=1",)),
    (SEVENTY, 79.6, ("slurm.nodes=1", "actor.parallel={}", "rollout.tp=8")),
]


def case(name: str, gib: float, *changes: str) -> Scenario:
    found = make_scenario(load_config(READY / name, changes))
    assert found is not None
    return replace(found, gpu=replace(found.gpu, memory_gib=gib))


def fits(name: str, gib: float, *changes: str) -> bool:
    """False also for a run that is refused."""
    try:
        found = case(name, gib, *changes)
    except UserError:
        return False
    return not found.lacks(found.memory())


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "gib", "changes"), MISFITS)
def test_it_fits_and_none_of_its_keys_can_be_left_out(name: str, gib: float, changes: tuple[str, ...]) -> None:
    asked = case(name, gib, *changes)
    assert asked.lacks(asked.memory())
    start = time.process_time()
    remedy = find_remedy(asked)
    assert time.process_time() - start <= 2
    assert remedy is not None
    words = remedy.text.split()
    assert fits(name, gib, *changes, *words)
    assert case(name, gib, *changes, *words).memory() == remedy.memory
    assert not [word for word in words if fits(name, gib, *changes, *(other for other in words if other != word))]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "gib", "changes", "text"),
    [
        (SMALL, 28.0, (), f"{ON_CPU} actor.memory.recompute=full rollout.tp=4 train.tokens_per_microbatch=6144"),
        (SMALL, 79.6, (*HALVES, "rollout.gpu_memory_utilization=0.99"), "rollout.gpu_memory_utilization=0.9"),
        (SMALL, 60.0, (*MESH, *GATHERED), "actor.memory.accumulation=reduce"),
        (SEVENTY, 79.6, ("rollout.tp=1",), "rollout.tp=8"),
        ("qwen2.5-3b-1gpu.yaml", 24.0, (), f"slurm.nodes=2 {ON_CPU} rollout.tp=2"),
    ],
)
def test_the_configured_layout_comes_before_others_and_those_before_nodes(
    name: str, gib: float, changes: tuple[str, ...], text: str
) -> None:
    remedy = find_remedy(case(name, gib, *changes))
    assert remedy is not None
    assert remedy.text == text


@pytest.mark.heavy
def test_settings_are_the_fastest_of_the_layout_but_for_keys_that_are_not_needed() -> None:
    """At 24 GiB a rank of the configured layout cannot hold weights and gradients of an update."""
    asked = case(SMALL, 24.0, "rollout.tp=2")
    remedy = find_remedy(asked)
    assert remedy is not None
    assert [key for key in remedy.changes if key.startswith("actor.parallel.")] == ["actor.parallel.pp"]
    best = fastest(asked.config, asked.shape, [replace(asked.layout, pp=2)], asked.gpu, asked.efficiency)
    assert best is not None
    assert remedy.changes.items() <= dict(differences(asked.config, best.config)).items()


def test_activations_leave_the_gpu_where_those_of_one_sequence_do_not_fit() -> None:
    """6.8 GiB of activations become 1.2."""
    remedy = find_remedy(case(SMALL, 54.0, *LONG))
    assert remedy is not None
    assert remedy.text == "actor.memory.recompute=full actor.memory.offload_activations=true"


def test_what_nothing_makes_fit_has_none() -> None:
    assert find_remedy(case("qwen2.5-3b-1gpu.yaml", 4.0)) is None


def test_the_picture_says_what_the_plan_says() -> None:
    asked = case(SMALL, 80.0, "train.tokens_per_microbatch=65536", "rollout.gpu_memory_utilization=0.3")
    plan, remedy = asked.memory(), find_remedy(asked)
    assert remedy is not None
    file = io.StringIO()
    Terminal(file=file, width=160, color_system=None).print(render_memory(plan, 80.0, remedy))
    text = file.getvalue()
    too_large = next(line for line in text.splitlines() if line.startswith("forward and backward"))
    assert f"{plan.peak / GIB:,.1f}" in too_large
    bar = re.search(r"  ([\w.]+)\|([\w.]+)  ", too_large)
    assert bar
    assert "A" in bar[2], "what crosses the line is to be seen"
    assert len(bar[1] + bar[2]) == 40
    assert len(bar[1]) == pytest.approx(40 * 80 / (plan.peak / GIB), abs=1)
    others = [line for line in text.splitlines() if "|" in line and line != too_large]
    assert {line.index("|") for line in others} == {too_large.index("|")}, "one line for all phases"
    assert "DOES NOT FIT: forward and backward" in text
    assert f"fits with  {remedy.text}  (at most {remedy.memory.peak / GIB:,.1f} GiB)" in text
