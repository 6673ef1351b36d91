"""The layouts that a search comes back with suit, fit, and are no slower than what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, read_model
from rlhpc.plan.back_ends import search_counts
from rlhpc.plan.checks.layout import check_layout
from rlhpc.plan.checks.run import check_nodes
from rlhpc.plan.checks.training import check_memory
from rlhpc.plan.estimates.hardware import GPUS
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.plan.scenario import changed_config
from rlhpc.plan.search import Candidate, SearchResult, _groups, search, variants
from rlhpc.sharding.layout import ParallelLayout
from tests.helpers.commands import invoke

ROOT = Path(__file__).parents[2]
MIXED, NODE = "deepseek-v3-671b-96gpus", "qwen2-7b-8gpus"


def loaded(name: str, *overrides: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(ROOT / "configs" / "ready" / f"{name}.yaml", overrides)
    return config, read_model(ROOT / config.model.path)


def found_for(config: RunConfig, shape: ModelShape, gpu: str) -> SearchResult:
    return search(config, shape, config.world_size, GPUS[gpu], config.site.efficiency)


@pytest.fixture(scope="module")
def one_node() -> SearchResult:
    return found_for(*loaded(NODE), "h100")


def over(data: dict[str, Any], fragment: dict[str, Any]) -> dict[str, Any]:
    """The fragment pasted into a configuration, section by section."""
    return {
        **data,
        **{
            key: over(data.get(key) or {}, value) if isinstance(value, dict) else value
            for key, value in fragment.items()
        },
    }


def test_best_layouts_suit_and_are_as_fast_as_predicted(one_node: SearchResult, tmp_path: Path) -> None:
    (config, shape), found = loaded(NODE), one_node
    seconds = [best.step.seconds for best in found.best]
    assert len(found.best) == 5
    assert seconds == sorted(seconds)
    asked = predict_step(config, shape, check_layout(config, 1, shape), GPUS["h100"], config.site.efficiency)
    assert seconds[0] <= asked.seconds
    base = yaml12.parse((ROOT / "configs" / "ready" / f"{NODE}.yaml").read_text(), "")
    for best in found.best:
        file = tmp_path / "pasted.yaml"
        file.write_text(yaml12.dump(over(base, best.fragment)))
        pasted = load_config(file)
        layout = check_nodes(pasted, 1, shape)
        assert layout == best.layout
        again = predict_step(pasted, shape, layout, GPUS["h100"], config.site.efficiency)
        assert again.seconds == pytest.approx(best.step.seconds)
        memory = predict_memory(pasted, shape, layout, GPUS["h100"].memory_gib)
        assert memory.peak == best.memory.peak <= 0.95 * GPUS["h100"].memory_bytes


@pytest.mark.heavy
def test_the_published_layout_is_matched_for_671_billion_parameters() -> None:
    config, shape = loaded(MIXED)
    found = found_for(config, shape, "h20")
    published = predict_step(config, shape, check_layout(config, 12, shape), GPUS["h20"], config.site.efficiency)
    assert found.layouts > 100
    assert found.best[0].step.seconds <= published.seconds
    assert found.best[0].memory.peak <= 0.95 * GPUS["h20"].memory_bytes, "it can be loaded and saved, too"


@pytest.mark.heavy
def test_less_memory_means_no_faster(one_node: SearchResult) -> None:
    config, shape = loaded(NODE)
    small = replace(GPUS["h100"], memory_gib=48.0)
    tight = search(config, shape, 8, small, config.site.efficiency)
    assert tight.best[0].step.seconds >= one_node.best[0].step.seconds
    assert tight.best[0].memory.peak <= small.memory_bytes


LONG = (
    "slurm.nodes=4",
    "resources.ranks_per_node=4",
    "actor.parallel.pp=4",
    "train.prompts_per_step=64",
    "data.max_prompt_tokens=1024",
    "rollout.max_response_tokens=15360",
    "planning.response_tokens=2000",
)


def long_sequences(gib: float, *changes: str) -> tuple[Candidate, ModelShape]:
    config, shape = loaded("qwen2.5-72b-96gpus", *LONG, *changes)
    gpu = replace(GPUS["h100"], memory_gib=gib)
    (best,) = search(config, shape, 16, gpu, config.site.efficiency, count=1).best
    assert best.config.actor.memory.recompute == "full"
    assert best.memory.peak <= 0.95 * gpu.memory_bytes
    check_memory(best.config.actor.memory, shape, best.layout)
    return best, shape


@pytest.mark.heavy
def test_larger_groups_of_layers_are_tried_where_one_does_not_fit() -> None:
    """Groups of two keep half the inputs of ten layers of eight microbatches, and need one layer's tensors more."""
    best, shape = long_sequences(52.0)
    assert best.fragment["actor"]["memory"]["recompute_layers"] == 2
    ungrouped = changed_config(best.config, {"actor.memory.recompute_layers": 1})
    single = predict_memory(ungrouped, shape, best.layout, 52.0)
    assert single.peak > 0.95 * 52 * 2**30
    assert long_sequences(58.0)[0].config.actor.memory.recompute_layers == 1


def test_groups_that_were_asked_for_give_way_where_they_do_not_divide() -> None:
    best, _ = long_sequences(58.0, "actor.memory.recompute_layers=9")
    assert best.fragment["actor"]["memory"]["recompute_layers"] == 1, "written out, over what was asked for"


def test_groups_divide_every_stage_of_actor_and_critic() -> None:
    config, shape = loaded("qwen2.5-72b-96gpus", *LONG, "actor.memory.recompute_layers=10")
    stages = [ParallelLayout(16, pp=pp, tp=2, vpp=vpp) for pp, vpp in ((1, None), (2, None), (4, None), (8, 5), (2, 8))]
    assert [_groups(config, shape, layout) for layout in stages] == [
        [1, 2, 4, 10],
        [1, 2, 4, 10],
        [1, 2, 4, 10],
        [1, 2],
        [1],
    ]
    small = f"critic.path={ROOT / 'configs' / 'ready' / 'models' / 'Qwen2.5-3B-Instruct'}"
    critic, _ = loaded(
        "qwen2.5-72b-96gpus",
        *LONG,
        "actor.memory.recompute_layers=10",
        "algorithm.name=ppo",
        small,
        "critic.parallel={pp: 4}",
    )
    assert _groups(critic, shape, stages[0]) == [1], "nine of the critic's 36 layers on each of four stages"


@pytest.mark.parametrize("told_by", ["slurm.memory", "site.gpus"])
def test_a_host_that_is_too_small_leaves_layouts_out(told_by: str) -> None:
    """On one rank there is one layout. What needs least of the GPU needs most of the host, and is not what counts."""
    config, shape = loaded("qwen2.5-0.5b-1gpu")
    gpu = GPUS["a100-40"]

    def hosts(mib: float | None) -> list[float]:
        asked = config
        if mib is not None and told_by == "slurm.memory":
            asked = config.model_copy(update={"slurm": config.slurm.model_copy(update={"memory": int(mib)})})
        of_node = mib / 1024 if mib is not None and told_by != "slurm.memory" else None
        found = search(asked, shape, 1, replace(gpu, cpu_memory_gib=of_node), config.site.efficiency)
        return [best.memory.cpu.node / 2**20 for best in found.best]

    (free,) = hosts(None)
    assert hosts(free + 1) == [free]
    assert all(less < free for less in hosts(free - 1))
    assert hosts(1024) == []


def test_memory_is_used_up_to_a_twentieth_of_the_gpu() -> None:
    """On one rank there is one layout: as it was found it comes again with a little more than a twentieth left."""
    config, shape = loaded("qwen2.5-0.5b-1gpu")
    gpu, efficiency = replace(GPUS["a100-40"], memory_gib=200.0), config.site.efficiency
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"gpu_memory_utilization": 0.01, "kv_cache_gib": 4.0})}
    )
    (ample,) = search(config, shape, 1, gpu, efficiency).best
    peak = ample.memory.peak / 2**30
    (same,) = search(config, shape, 1, replace(gpu, memory_gib=peak / 0.949), efficiency).best
    assert same.fragment == ample.fragment
    (leaner,) = search(config, shape, 1, replace(gpu, memory_gib=peak / 0.951), efficiency).best
    assert leaner.memory.peak < ample.memory.peak


@pytest.mark.heavy
def test_no_layout_that_fits_is_reported(tmp_path: Path) -> None:

    def error_line(*arguments: str) -> str:
        done = invoke("plan", "search", f"{ROOT}/configs/ready/{NODE}.yaml", *arguments)
        assert isinstance(done.exception, UserError), done.output
        return str(done.exception)

    few = ("train.prompts_per_step=1", "rollout.samples_per_prompt=8", "train.minibatches=1")
    assert error_line("resources.ranks_per_node=11", "rollout.tp=1", *few).startswith(
        "rlhpc plan search: no layout of 11 ranks suits model, batches and h100; take another number of nodes"
    )
    line = error_line("slurm.memory=1G")
    assert " layouts fits into 79.6 GiB and 1 GiB of CPU memory per node (slurm.memory); use more" in line


def test_no_settings_that_fit_are_faster_than_the_best() -> None:
    """On one rank there is one layout and one engine size."""
    config, shape = loaded("qwen2.5-3b-1gpu")
    gpu, efficiency = GPUS["a100-40"], config.site.efficiency
    (best,) = search(config, shape, 1, gpu, efficiency).best
    tried = list(variants(config, best.layout, shape, gpu))
    fitting = [
        predict_step(each, shape, best.layout, gpu, efficiency).seconds
        for each in tried
        if predict_memory(each, shape, best.layout, gpu.memory_gib, gpu.reserves).peak <= 0.95 * gpu.memory_bytes
    ]
    assert len(tried) > len(fitting) > 1
    assert best.step.seconds == pytest.approx(min(fitting))


def test_engines_too_large_for_every_size_are_refused() -> None:
    config, shape = loaded(
        MIXED, "slurm.nodes=1", "actor.parallel.pp=1", "actor.parallel.last_stage_layers=null", "rollout.tp=8"
    )
    with pytest.raises(UserError, match="no engine size leaves room"):
        found_for(config, shape, "h20")


@pytest.mark.heavy
def test_each_number_of_gpus_has_its_fastest_layout_or_a_reason() -> None:
    config, shape = loaded(MIXED, "train.prompts_per_step=16", "rollout.samples_per_prompt=1")
    tried = search_counts(config, shape, GPUS["h20"], config.site.efficiency, [8, 97, 96, 192])
    tiny, odd, fits, more = tried
    assert (tiny.best, odd.best) == (None, None)
    assert tiny.reason == "no engine size leaves room for a whole sequence in the KV cache"
    assert odd.reason == "no whole nodes of 8 GPUs"
    assert fits.best is not None
    assert more.best is not None
    assert (fits.best.layout.world_size, more.best.layout.world_size) == (96, 192)
    assert fits.best.step.seconds > more.best.step.seconds
    assert fits.speed > more.speed > 0
