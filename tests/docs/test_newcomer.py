"""README's first screen, followed as a new user follows it: a few commands and lines of YAML start a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.data import arithmetic
from tests.docs.pages import ROOT, blocks
from tests.helpers import session
from tests.helpers.runs import records

README = ROOT / "README.md"
MOST_COMMANDS, MOST_LINES = 3, 10
# A CPU and the test's patience: all else is what README's file and the defaults give.
SMALL = (
    "resources.ranks_per_node=1 model.dtype=float32 train.steps=1 train.prompts_per_step=4 "
    "rollout.samples_per_prompt=2 rollout.max_response_tokens=4 rollout.kv_cache_gib=0.0625 data.max_prompt_tokens=16"
)


def named(language: str, file: str) -> str:
    """README's first block of the language that begins with the name of the file."""
    return next(text for text in blocks(README, language) if text.startswith(f"# {file}"))


def way() -> list[str]:
    """Commands from README's first line to the start of a run, without the demo, which is a way of its own."""
    lines = [line.partition("#")[0].strip() for text in blocks(README, "sh") for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.endswith("rlhpc run my.yaml"))
    return [line for line in lines[: start + 1] if not line.startswith("make ")]


def test_the_way_to_a_run_is_short() -> None:
    assert len(way()) <= MOST_COMMANDS
    assert len(named("yaml", "my.yaml").splitlines()) <= MOST_LINES


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_way_leads_to_a_first_step(tmp_path: Path) -> None:
    """In a bare folder, with an environment that is installed already and a dataset in verl's columns."""
    session.need("ranks", "vllm")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "my.yaml").write_text(named("yaml", "my.yaml"))
    (tmp_path / "my_reward.py").write_text(named("python", "my_reward.py"))
    arithmetic.make(str(tmp_path / "made"))
    for made, given in (("model", "models/qwen"), ("train.parquet", "data/train.parquet")):
        (tmp_path / given).parent.mkdir()
        shutil.move(tmp_path / "made" / made, tmp_path / given)
    *_, last = way()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        f"{last} {SMALL}", shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = (record for record in records(tmp_path / "runs" / "my-run") if record["step"] == 1)
    assert step["phase"] == "rl"
    assert 0 <= step["reward/mean"] <= 1
