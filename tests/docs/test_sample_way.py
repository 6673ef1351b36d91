"""The page on the architecture lists the files that a sample passes in an RL step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.launch.runs.run import run_here
from tests.helpers.runs import write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
RANKS = {"colocated": {}, "separate": {"resources__ranks_per_node": 2, "rollout__ranks": 1}}


def passed(folder: Path, placement: str) -> set[str]:
    """Files of an RL step on all ranks, while the engine writes what the step trains on."""
    file = write_config(
        folder,
        placement=placement,
        sft=None,
        rollout__samples_per_prompt=2,
        train={"steps": 1, "prompts_per_step": 2, "step": "tests.helpers.sample_way:step"},
        data__validation=[],
        **{"resources__ranks_per_node": 1, **RANKS[placement]},
    )
    assert run_here(load_config(file), entry="tests.helpers.sample_way:rank") == 0
    return {name for note in (folder / "run").glob("way-*.json") for name in json.loads(note.read_text())}


def test_files_of_a_step_are_those_of_the_page(tmp_path: Path) -> None:
    colocated, separate = (passed(tmp_path / placement, placement) for placement in RANKS)
    found = {"both": colocated & separate, "colocated": colocated - separate, "separate": separate - colocated}
    table = "\n".join(f"| {row} | {', '.join(f'`{name}`' for name in sorted(files))} |" for row, files in found.items())
    rows = re.findall(r"^\| (both|colocated|separate) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert {row: set(re.findall(r"`(.+?)`", files)) for row, files in rows} == found, f"the page's rows:\n{table}"
