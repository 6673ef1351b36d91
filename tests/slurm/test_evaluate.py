"""``rlhpc eval --submit``: an evaluation as a batch job finds what one on this machine finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import runs

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def test_an_evaluation_as_a_job_finds_what_one_here_finds(front):
    """Two ranks on two nodes, from a folder of the user's."""
    folder = front.folder / "mine"
    config = runs.write_config(
        folder,
        sft=None,
        slurm__nodes=2,
        slurm__gpus_per_node=0,
        validation={"samples_per_prompt": 2, "temperature": 1.0, "max_prompts": 8},
    )
    words = [sys.executable, "-m", "rlhpc.cli.main", "eval", str(config)]
    environ = {"XDG_STATE_HOME": str(front.folder / "state"), "COLUMNS": "200"}

    def submitted(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*words, "--submit", "--name", "there", *options]
        return front.cluster.run(command, env=environ, cwd=folder, timeout=900)

    printed = submitted("--dry-run")
    assert printed.returncode == 0, printed.stderr
    assert "#SBATCH --nodes=2" in printed.stdout
    assert not (folder / "eval").exists(), "a dry run writes nothing"

    done = submitted("--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "maj@2" in done.stdout
    here = subprocess.run([*words, "--name", "here", "slurm.nodes=1"], cwd=folder, capture_output=True, text=True)
    assert here.returncode == 0, here.stdout + here.stderr
    found, expected = (results(folder / "eval" / name) for name in ("there", "here"))
    assert found == expected
    assert len(found[1]) == 2 * 8
    listed = front.ok("status", str(folder / "eval" / "there"))
    assert "finished" in listed


def results(folder: Path) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Metrics, and what was answered."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    return metrics, [(sample["prompt"], sample["response"]) for sample in samples]
