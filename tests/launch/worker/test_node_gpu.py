"""What a node with GPUs lacks is named before anything heavy is imported."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import NodeError, UserError
from rlhpc.launch import driver, machine
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.worker.node_check import check_node
from rlhpc.launch.worker.node_gpu import check_gpus
from tests.helpers.plain_model import write_inputs

HOST = re.escape(socket.gethostname())
ROOT = Path(__file__).parents[3]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with four GPUs, a compiler, and CPU wheels; the environment of a rank there."""
    devices, programs = tmp_path / "dev", tmp_path / "bin"
    devices.mkdir()
    programs.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    make_program(programs / "gcc")
    monkeypatch.setattr(machine, "_DEVICES", devices)
    return {"PATH": str(programs), "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def make_program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_a_good_node_passes(node: dict[str, str]) -> None:
    check_gpus(4, node)
    del node["CUDA_VISIBLE_DEVICES"]
    check_gpus(4, node)


@pytest.mark.parametrize("visible", ["0", "1,2", "GPU-4a3f"])
def test_a_rank_that_sees_some_of_its_node_s_gpus_names_the_option_that_works(
    node: dict[str, str], visible: str
) -> None:
    expected = (
        f"a rank sees {visible.count(',') + 1} of the node's GPUs (CUDA_VISIBLE_DEVICES={visible}), but vLLM needs it "
        "to see one for each of the 4 ranks there; submit with --gpus-per-node=N or --gres=gpu:N, with --gpu-bind=none"
    )
    with pytest.raises(UserError, match=rf"^node {HOST}: {re.escape(expected)}$") as caught:
        check_gpus(4, node | {"CUDA_VISIBLE_DEVICES": visible})
    assert not isinstance(caught.value, NodeError), "another node would do no better"
    check_gpus(1, node | {"CUDA_VISIBLE_DEVICES": visible})


def test_a_node_that_has_lost_a_gpu_is_at_fault(node: dict[str, str]) -> None:
    (machine._DEVICES / "nvidia2").unlink()
    with pytest.raises(NodeError, match="3 GPUs for 4 ranks"):
        check_gpus(4, node)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_nothing_is_asked_of_ranks_that_see_no_gpu(node: dict[str, str], visible: str) -> None:
    check_gpus(8, node | {"PATH": "", "CUDA_VISIBLE_DEVICES": visible})


def test_nothing_is_asked_of_ranks_that_are_to_compute_on_cpus(node: dict[str, str]) -> None:
    """By slurm.gpus_per_node: 0, on nodes that have GPUs."""
    del node["CUDA_DEVICE_MAX_CONNECTIONS"]
    check_gpus(8, node | {"PATH": ""})


def test_nothing_is_asked_of_a_node_without_gpus(node: dict[str, str]) -> None:
    for file in machine._DEVICES.iterdir():
        file.unlink()
    check_gpus(8, node | {"PATH": ""})


def test_a_missing_compiler_is_named(node: dict[str, str], tmp_path: Path) -> None:
    programs = Path(node["PATH"])
    (programs / "gcc").unlink()
    expected = rf"^node {HOST}: no C compiler \(gcc or clang\) in PATH; Triton needs one for vLLM's kernels; load a "
    with pytest.raises(UserError, match=expected):
        check_gpus(4, node)
    make_program(tmp_path / "mine")
    check_gpus(4, node | {"CC": str(tmp_path / "mine")})
    make_program(programs / "clang")
    check_gpus(4, node)
    with pytest.raises(UserError, match="CC=icc is not a program"):
        check_gpus(4, node | {"CC": "icc"})


def test_an_old_driver_is_named(node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue\n")
    monkeypatch.setattr(driver, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(driver, "needed_cuda", lambda: "13.0")
    with pytest.raises(UserError, match=rf"^node {HOST}: NVIDIA driver 535\.54\.03 is too old .* built for CUDA 12$"):
        check_node(tmp_path, "localhost", ranks_here=4, environ=node | {"TMPDIR": "/tmp", "HOME": "/"})


def test_a_run_on_this_machine_needs_a_compiler_too(
    node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", node["PATH"])
    (Path(node["PATH"]) / "gcc").unlink()
    with pytest.raises(UserError, match=r"^this machine: no C compiler \(gcc or clang\) in PATH"):
        run_here(load_config(write_inputs(tmp_path), [f"run_dir={tmp_path}/run"]))
    assert not (tmp_path / "run").exists()


BOUND_RANK = """
import sys
from pathlib import Path
from rlhpc.core.folder import AttemptFolder
from rlhpc.launch import machine
from rlhpc.launch.worker import main
machine._DEVICES = Path(sys.argv[1])
main.main(AttemptFolder(Path(sys.argv[2])))
"""


def test_a_rank_leaves_the_reason_for_the_launcher_and_ends_as_after_a_user_s_error(
    node: dict[str, str], tmp_path: Path
) -> None:
    attempt = tmp_path / "run" / "attempts" / "0001"
    (attempt / "exits").mkdir(parents=True)
    slurm = {"PROCID": "1", "NTASKS": "2", "LOCALID": "1", "NTASKS_PER_NODE": "2"}
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        **{
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "CUDA_VISIBLE_DEVICES": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
            "PYTHONPATH": str(ROOT),
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", BOUND_RANK, machine._DEVICES, attempt], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "a rank sees 1 of the node's GPUs (CUDA_VISIBLE_DEVICES=1)" in done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((attempt / "exits" / "rank-00001.exit.json").read_text())
    assert record["kind"] == "user"
    assert "--gpu-bind=none" in record["message"]
