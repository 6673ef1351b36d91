"""The README's table shows the results of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from tools import demo_table, markers
from tools.demo_table import Result, overrides, result_of, table

RECORDS = [
    {"phase": "sft", "step": 300, "loss": 0.1},
    {"phase": "rl", "step": 0, "validation/reward_mean": 0.25},
    {"phase": "rl", "step": 1, "reward/mean": 0.4},
    {"phase": "rl", "step": 2, "reward/mean": 0.6, "validation/reward_mean": 0.96875},
]


def test_a_result_is_first_and_last_validation() -> None:
    assert result_of(1, RECORDS, 90.4) == Result(1, 0.25, 0.96875, 2, 90.4)


def test_the_table_keeps_a_seed_that_missed() -> None:
    good, weak = Result(0, 0.25, 0.96875, 2, 90.4), Result(1, 0.25, 0.85, 2, 80.0)
    assert table([good, weak], 2).splitlines() == [
        "| seed | held-out accuracy after the warm-up | after GRPO | RL steps | seconds on 2 CPU cores |",
        "| --- | --- | --- | --- | --- |",
        "| 0 | 25.0% | 96.9% | 2 | 90 |",
        "| 1 (missed) | 25.0% | 85.0% | 2 | 80 |",
    ]
    assert good.holds
    assert not weak.holds
    assert not Result(2, 0.6, 0.99, 2, 80.0).holds


def test_a_seed_has_inputs_of_its_own() -> None:
    """All paths of the demo's own inputs are replaced."""
    config = load_config(demo_table.CONFIG, overrides(7, Path("there")))
    assert config.sft is not None
    assert config.prepare is not None
    assert (config.seed, config.prepare.arguments["seed"]) == (7, 7)
    paths = [
        config.model.path,
        *(file.path for file in (*config.data.train, *config.data.validation)),
        *config.sft.data,
    ]
    assert {path.parts[0] for path in paths} == {"there"}
    assert "demo-inputs" not in config.model_dump_json()


def test_only_what_is_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- t -->\nold\n<!-- t -->\nb\n")
    markers.rewrite(page, "t", "new\n")
    assert page.read_text() == "a\n<!-- t -->\nnew\n<!-- t -->\nb\n"
    assert markers.between(page, "t") == "new\n"
    with pytest.raises(ValueError, match="has 0 lines <!-- u -->, not 2"):
        markers.rewrite(page, "u", "new\n")
