"""README's first screen, followed as a new user follows it: a few commands and lines of YAML start a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
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
    "resources.ranks_per_node=1 model.dtype=float32 train.steps=10 train.prompts_per_step=4 "
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


@dataclass
class FirstRun:
    """What the user saw: lines with the seconds since the command, and CPU seconds of the command up to the first."""

    folder: Path
    code: int
    lines: list[tuple[float, str]]
    cpu_seconds: float

    @property
    def output(self) -> str:
        return "".join(line for _, line in self.lines)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """In a bare folder, with an environment that is installed already and a dataset in verl's columns."""
    session.need("ranks", "vllm")
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my.yaml").write_text(named("yaml", "my.yaml"))
    (folder / "my_reward.py").write_text(named("python", "my_reward.py"))
    arithmetic.make(str(folder / "made"))
    for made, given in (("model", "models/qwen"), ("train.parquet", "data/train.parquet")):
        (folder / given).parent.mkdir()
        shutil.move(folder / "made" / made, folder / given)
    *_, last = way()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    began, lines, cpu_seconds = time.monotonic(), [], 0.0
    with subprocess.Popen(
        f"exec {last} {SMALL}",
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            cpu_seconds = cpu_seconds or _cpu_seconds(process.pid)
            lines.append((time.monotonic() - began, line))
    return FirstRun(folder, process.returncode, lines, cpu_seconds)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_way_leads_to_a_first_step(first_run: FirstRun) -> None:
    assert first_run.code == 0, first_run.output
    (step,) = (record for record in records(first_run.folder / "runs" / "my-run") if record["step"] == 1)
    assert step["phase"] == "rl"
    assert 0 <= step["reward/mean"] <= 1


@pytest.mark.ranks
@pytest.mark.vllm
def test_it_says_what_it_does_from_the_first_seconds_on(first_run: FirstRun) -> None:
    """CPU time stands for the time to the first line: on a quiet machine they are the same."""
    lines = [line.rstrip() for _, line in first_run.lines]
    assert lines[0] == "starting my-run"
    assert first_run.cpu_seconds < 2
    assert f"  folder  {first_run.folder / 'runs' / 'my-run'}" in lines
    assert any(line.startswith("  layout  1 ranks on 1 node(s): training ") for line in lines), first_run.output
    first = next(index for index, line in enumerate(lines) if line.startswith("rl step "))
    times = [0.0, *(seconds for seconds, _ in first_run.lines[: first + 1])]
    assert max(after - before for before, after in pairwise(times)) < 10, first_run.output
    assert any(line.startswith("starting: ") for line in lines), f"a phase, after some seconds: {first_run.output}"


@pytest.mark.ranks
@pytest.mark.vllm
def test_an_untrained_model_without_any_reward_is_warned_of_once(first_run: FirstRun) -> None:
    """On the terminal and in the log of rank 0."""
    assert {record["reward/max"] for record in records(first_run.folder / "runs" / "my-run")} == {0.0}
    log = next((first_run.folder / "runs" / "my-run").rglob("rank-00000.log")).read_text()
    for text in (first_run.output, log):
        assert text.count("no response had an advantage in 10 steps") == 1, text


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_log_of_a_healthy_run_has_no_warnings_of_other_packages(first_run: FirstRun) -> None:
    """Only our own warning."""
    lines = next((first_run.folder / "runs" / "my-run").rglob("rank-00000.log")).read_text().splitlines()
    others = [line for line in lines if not re.match(r"\d{4}-\S+ \S+ rank 0 rlhpc\.", line)]
    assert others == []
    assert "Warning" not in first_run.output
