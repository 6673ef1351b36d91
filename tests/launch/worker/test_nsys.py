"""Ranks under Nsight Systems, with a program in its place that records its arguments and runs the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.observe import ProfileSection
from rlhpc.core import env
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.local import run_local
from rlhpc.launch.supervise.srun import srun_command, srun_environment
from rlhpc.launch.worker.nsys import nsys_command, nsys_environment
from tests.helpers.plain_model import write_inputs

ROOT = Path(__file__).parents[3]
# Its own options, then the command.
FIRST = {
    env.RANK: "0",
    env.WORLD_SIZE: "4",
    env.LOCAL_RANK: "0",
    env.MASTER_ADDR: "127.0.0.1",
    env.MASTER_PORT: "1",
}
STAND_IN = """#!/bin/sh
echo "$@" >>{folder}/nsys-arguments
while [ $# -gt 0 ]; do case "$1" in profile|--*) shift;; *) break;; esac; done
{run}
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """File with the arguments that nsys was called with, a line for each call; it runs the command by default."""
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(folder=tmp_path, run=getattr(request, "param", '"$@"')))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nsys-arguments"


def test_without_the_tool_nothing_is_wrapped() -> None:
    assert nsys_environment(ProfileSection(tools=["torch"])) == {}


def test_the_ranks_of_the_section_are_wrapped() -> None:
    section = ProfileSection(tools=["nsys"], ranks=[0, "8-95:8"])
    assert nsys_environment(section) == {env.RLHPC_NSYS: "0,8-95:8"}
    assert nsys_environment(ProfileSection(tools=["nsys"], ranks=["all"])) == {env.RLHPC_NSYS: "all"}


def test_the_command_captures_ranges_of_the_cuda_profiler() -> None:
    assert nsys_command("/opt/nsys", Path("/run/profiles/nsys/0001-rank-00008"), ["python", "-m", "x", "a b"]) == [
        "/opt/nsys",
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=repeat",
        "--output=/run/profiles/nsys/0001-rank-00008",
        "--force-overwrite=true",
        "python",
        "-m",
        "x",
        "a b",
    ]


def test_srun_passes_the_ranks_on_and_its_command_stays(tmp_path: Path) -> None:
    plain, wrapped = (
        load_config(write_inputs(tmp_path), ["resources.ranks_per_node=2", *more])
        for more in ([], ["profile.tools=[nsys]"])
    )
    attempt = RunFolder(tmp_path).attempt(1)
    assert srun_command(plain, ("a",), attempt) == srun_command(wrapped, ("a",), attempt)
    environments = [srun_environment(config, 2, "a", (1, b"x"), 2) for config in (plain, wrapped)]
    assert environments[1] == {**environments[0], env.RLHPC_NSYS: "0"}


@pytest.mark.ranks
def test_the_chosen_ranks_run_under_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Path) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "given.yaml"
    file.write_text(
        "{name: tiny, model: {path: none}, train: {steps: 1}, resources: {ranks_per_node: 2}, "
        "profile: {tools: [nsys], ranks: [1]}}"
    )
    run = RunFolder(tmp_path / "run")
    assert run_local(load_config(file), run, entry="tests.launch.programs:write_environment") == 0
    (line,) = arguments.read_text().splitlines()
    assert f"--output={run.path}/profiles/nsys/0001-rank-00001 " in line
    assert " -u -m rlhpc.launch.worker.main " in line
    for rank in (0, 1):
        assert env.RLHPC_NSYS not in json.loads((run.path / f"environment-{rank}.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "ranks", "code"), [("exit 7", "0", 7), ("exit 7", "1-3", 2)], indirect=["arguments"]
)
def test_a_rank_of_srun_becomes_nsys_if_it_is_chosen(tmp_path: Path, arguments: Path, ranks: str, code: int) -> None:
    attempt = RunFolder(tmp_path / "run").attempt(1)
    command = [sys.executable, "-u", "-m", "rlhpc.launch.worker.main", str(attempt.path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **FIRST, env.RLHPC_NSYS: ranks}, capture_output=True)
    assert done.returncode == code, done.stderr
    assert arguments.exists() == (code == 7)
    if code == 7:
        assert arguments.read_text().endswith(f" {' '.join(command)}\n")


@pytest.mark.heavy
def test_without_nsys_the_rank_continues_and_says_so(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path / "run").attempt(1)
    command = [sys.executable, "-u", "-m", "rlhpc.launch.worker.main", str(attempt.path)]
    environ = {**os.environ, **FIRST, env.RLHPC_NSYS: "0", env.PATH: "/nowhere"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert "rank 0 continues without Nsight Systems: nsys is not in PATH" in done.stderr
    assert done.returncode == 2, "a folder that is not there is an error of the user's"
