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
from rlhpc.launch import machine
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.worker.node_check import check_node
from rlhpc.launch.worker.node_gpu import check_gpus, claim_gpu
from tests.helpers.fake_driver import build_driver, gpu_lines, uuid_of
from tests.helpers.machine import have_driver, have_gpus
from tests.helpers.plain_model import write_inputs

HOST = re.escape(socket.gethostname())
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def node(tmp_path: Path, library: Path) -> dict[str, str]:
    """A machine with four GPUs, a compiler, and CPU wheels; the environment of a rank there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    make_program(programs / "gcc")
    (tmp_path / "gpus").write_text(gpu_lines(["ok"] * 4))
    return {
        "PATH": str(programs),
        "RLHPC_GPU_SECONDS": "60",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "LD_LIBRARY_PATH": str(library),
        "FAKE_GPUS": str(tmp_path / "gpus"),
    }


def make_program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_a_good_node_passes_and_each_rank_has_a_gpu_of_its_own(node: dict[str, str]) -> None:
    assert [check_gpus(4, rank, node) for rank in (0, 3)] == [uuid_of(0), uuid_of(3)]
    del node["CUDA_VISIBLE_DEVICES"]
    assert check_gpus(4, 1, node) == uuid_of(1)
    assert check_gpus(2, 1, node | {"CUDA_VISIBLE_DEVICES": "2,0"}) == uuid_of(0)


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,2", 2), ("GPU-4a3f", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0)]
)
def test_a_rank_that_sees_some_of_its_node_s_gpus_names_the_option_that_works(
    node: dict[str, str], visible: str, count: int
) -> None:
    expected = (
        f"a rank sees {count} of the node's GPUs (CUDA_VISIBLE_DEVICES={visible}), but vLLM needs it to see one for "
        "each of the 4 ranks there; submit with --gpus-per-node=N or --gres=gpu:N, with --gpu-bind=none"
    )
    with pytest.raises(UserError, match=rf"^node {HOST}: {re.escape(expected)}") as caught:
        check_gpus(4, 0, node | {"CUDA_VISIBLE_DEVICES": visible})
    assert not isinstance(caught.value, NodeError), "another node would do no better"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("states", "what"),
    [
        (["ok", "ok", "ok"], "CUDA finds 3 usable GPUs for 4 ranks"),
        ([], r"no GPU is usable: cuInit: no CUDA-capable device is detected \(100\)"),
        (["ok", "lost", "ok", "ok"], rf"GPU 1 \({uuid_of(1)}\) fails: cuMemAlloc_v2: GPU is lost \(219\)"),
        (["ok", "wedged", "ok", "ok"], rf"GPU 1 \({uuid_of(1)}\) does not answer within 1.5 s"),
    ],
)
def test_a_node_whose_gpu_is_missing_or_does_not_work_is_at_fault(
    node: dict[str, str], states: list[str], what: str
) -> None:
    Path(node["FAKE_GPUS"]).write_text(gpu_lines(states))
    node["RLHPC_GPU_SECONDS"] = "1.5"
    remedy = "exclude the node, or set slurm.gpus_per_node: 0 to compute on the CPU"
    with pytest.raises(NodeError, match=rf"^node {HOST}: {what}; {remedy}$"):
        check_gpus(4, 1, node)


def test_a_node_without_a_driver_is_at_fault(node: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"no GPU is usable: cuInit: unknown error \(999\)"):
        check_gpus(1, 0, node | {"FAKE_GPUS": str(tmp_path / "none")})
    with pytest.raises(NodeError, match=r"the driver's library does not load \(libcuda.so.1: cannot "):
        check_gpus(1, 0, node | {"LD_LIBRARY_PATH": ""})


def test_a_job_without_gpus_on_nodes_without_any_names_the_option(
    node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node would do no better; a node that Slurm gave for its GPUs, or that has a driver, is at fault."""
    have_gpus(monkeypatch, tmp_path, 0)
    del node["CUDA_VISIBLE_DEVICES"]
    with pytest.raises(NodeError, match="no GPU is usable: cuInit"):
        check_gpus(1, 0, node | {"FAKE_GPUS": ""})
    del node["LD_LIBRARY_PATH"]
    with pytest.raises(NodeError, match="no GPU is usable: the driver's library"):
        check_gpus(1, 0, node | {"SLURM_GPUS_ON_NODE": "4"})
    with pytest.raises(
        UserError, match=rf"^node {HOST}: the job has no GPUs from Slurm, .* --gpu-bind=none, or set "
    ) as caught:
        check_gpus(1, 0, node)
    assert not isinstance(caught.value, NodeError)


def test_two_ranks_never_have_one_gpu(node: dict[str, str], tmp_path: Path) -> None:
    """Each sees two GPUs, in an order of its own."""
    seen = [check_gpus(2, rank, node | {"CUDA_VISIBLE_DEVICES": order}) for rank, order in enumerate(("0,1", "1,0"))]
    assert seen == [uuid_of(0)] * 2
    claim_gpu(uuid_of(0), 0, str(tmp_path))
    claim_gpu(uuid_of(1), 1, str(tmp_path))
    with pytest.raises(UserError, match=rf"^node {HOST}: ranks 0 and 1 of the node have the same GPU, {uuid_of(0)}: "):
        claim_gpu(uuid_of(0), 1, str(tmp_path))


def test_nothing_is_asked_of_ranks_that_are_to_compute_on_cpus(node: dict[str, str]) -> None:
    """By slurm.gpus_per_node: 0, on nodes that have GPUs."""
    del node["RLHPC_GPU_SECONDS"]
    assert check_gpus(8, 0, node | {"PATH": ""}) is None


def test_a_missing_compiler_is_named(node: dict[str, str], tmp_path: Path) -> None:
    programs = Path(node["PATH"])
    (programs / "gcc").unlink()
    expected = rf"^node {HOST}: no C compiler \(gcc or clang\) in PATH; Triton needs one for vLLM's kernels; load a "
    with pytest.raises(UserError, match=expected):
        check_gpus(4, 0, node)
    make_program(tmp_path / "mine")
    check_gpus(4, 0, node | {"CC": str(tmp_path / "mine")})
    make_program(programs / "clang")
    check_gpus(4, 0, node)
    with pytest.raises(UserError, match="CC=icc is not a program"):
        check_gpus(4, 0, node | {"CC": "icc"})


def test_an_old_driver_is_named(node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_driver(monkeypatch, tmp_path, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue\n")
    monkeypatch.setattr(machine, "needed_cuda", lambda: "13.0")
    with pytest.raises(UserError, match=rf"^node {HOST}: NVIDIA driver 535\.54\.03 is too old .* built for CUDA 12$"):
        check_node(tmp_path, "localhost", ranks_here=4, environ=node | {"TMPDIR": "/tmp", "HOME": "/"})


def test_a_run_on_this_machine_needs_a_compiler_too(
    node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, tmp_path, 1)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", node["PATH"])
    (Path(node["PATH"]) / "gcc").unlink()
    with pytest.raises(UserError, match=r"^this machine: no C compiler \(gcc or clang\) in PATH"):
        run_here(load_config(write_inputs(tmp_path), [f"run_dir={tmp_path}/run"]))
    assert not (tmp_path / "run").exists()


def test_a_rank_leaves_the_reason_for_the_launcher_and_ends_as_after_a_user_s_error(
    tmp_path: Path,
) -> None:
    attempt = tmp_path / "run" / "attempts" / "0001"
    (attempt / "exits").mkdir(parents=True)
    slurm = {"PROCID": "1", "NTASKS": "2", "LOCALID": "1", "NTASKS_PER_NODE": "2"}
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        **{
            "RLHPC_GPU_SECONDS": "60",
            "CUDA_VISIBLE_DEVICES": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
            "PYTHONPATH": str(ROOT),
        },
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.launch.worker.main", attempt], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "a rank sees 1 of the node's GPUs (CUDA_VISIBLE_DEVICES=1)" in done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((attempt / "exits" / "rank-00001.exit.json").read_text())
    assert record["kind"] == "user"
    assert "--gpu-bind=none" in record["message"]
