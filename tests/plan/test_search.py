"""The layouts that a search comes back with suit, fit, and are no slower than what was asked for; a sweep's numbers."""

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
from rlhpc.plan.check import check_layout, check_nodes
from rlhpc.plan.hardware import GPUS
from rlhpc.plan.memory import predict_memory
from rlhpc.plan.search import Found, search
from rlhpc.plan.step_time import predict_step
from rlhpc.plan.sweep import parse_range, plot, sweep

ROOT = Path(__file__).parents[2]
MIXED, NODE = "deepseek-v3-671b-96gpus", "qwen2-7b-8gpus"


def loaded(name: str, *overrides: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(ROOT / "configs" / "ready" / f"{name}.yaml", overrides)
    return config, read_model(ROOT / config.model.path)


def found_for(config: RunConfig, shape: ModelShape, gpu: str) -> Found:
    return search(config, shape, config.world_size, GPUS[gpu], config.planning.efficiency)


@pytest.fixture(scope="module")
def one_node() -> Found:
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


def test_best_layouts_suit_and_are_as_fast_as_foretold(one_node: Found, tmp_path: Path) -> None:
    (config, shape), found = loaded(NODE), one_node
    seconds = [best.step.seconds for best in found.best]
    assert len(found.best) == 5
    assert seconds == sorted(seconds)
    asked = predict_step(config, shape, check_layout(config, 1, shape), GPUS["h100"], config.planning.efficiency)
    assert seconds[0] <= asked.seconds
    base = yaml12.parse((ROOT / "configs" / "ready" / f"{NODE}.yaml").read_text(), "")
    for best in found.best:
        file = tmp_path / "pasted.yaml"
        file.write_text(yaml12.dump(over(base, best.fragment)))
        pasted = load_config(file)
        layout = check_nodes(pasted, 1, shape)
        assert layout == best.layout
        again = predict_step(pasted, shape, layout, GPUS["h100"], config.planning.efficiency)
        assert again.seconds == pytest.approx(best.step.seconds)
        memory = predict_memory(pasted, shape, layout, GPUS["h100"].memory_gib)
        assert memory.peak == best.memory.peak <= GPUS["h100"].memory_bytes


@pytest.mark.slow
def test_the_published_layout_is_matched_for_671_billion_parameters() -> None:
    config, shape = loaded(MIXED)
    found = found_for(config, shape, "h20")
    published = predict_step(config, shape, check_layout(config, 12, shape), GPUS["h20"], config.planning.efficiency)
    assert found.layouts > 100
    assert found.best[0].step.seconds <= published.seconds
    within = [phase for phase in found.best[0].memory.phases if phase.name not in ("load", "save")]
    assert all(phase.total <= GPUS["h20"].memory_bytes for phase in within)


def test_less_memory_means_no_faster(one_node: Found) -> None:
    config, shape = loaded(NODE)
    small = replace(GPUS["h100"], memory_gib=48.0)
    tight = search(config, shape, 8, small, config.planning.efficiency)
    assert tight.best[0].step.seconds >= one_node.best[0].step.seconds
    assert tight.best[0].memory.peak <= small.memory_bytes


def test_engines_too_large_for_every_size_are_told() -> None:
    config, shape = loaded(MIXED, "slurm.nodes=1", "parallel.pp=1", "parallel.last_stage_layers=null", "rollout.tp=8")
    with pytest.raises(UserError, match="no size of the engines leaves room"):
        found_for(config, shape, "h20")


def test_a_sweep_has_numbers_that_suit(tmp_path: Path) -> None:
    config, shape = loaded(MIXED)
    points = sweep(config, shape, GPUS["h20"], config.planning.efficiency, 96, 1024)
    assert [point.ranks for point in points] == [96, 192, 384, 768, 960]
    assert [point.layout.dp for point in points] == [1, 2, 4, 8, 10]
    seconds = [point.step.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert points[-1].step.tokens_per_second < 10 * points[0].step.tokens_per_second
    assert points[0].memory.peak > points[-1].memory.peak
    plot(points, tmp_path / "sweep.png", "title")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["96..1024", "gpus=96", "gpus=1024..96", "gpus=0..8", "gpu=1..2"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="write it as gpus=96"):
        parse_range(text)


def test_no_number_that_suits_is_told() -> None:
    config, shape = loaded(MIXED)
    with pytest.raises(UserError, match="use multiples of 96"):
        sweep(config, shape, GPUS["h20"], config.planning.efficiency, 97, 100)
