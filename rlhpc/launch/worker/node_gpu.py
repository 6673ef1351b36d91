"""Checks that ranks can use a node's GPUs: enough visible ones that answer, a driver, a compiler. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.rank import node_name
from rlhpc.launch.machine import check_installed_driver, gpu_count, gpu_devices, visible_gpus
from rlhpc.launch.slurm.job_spec import WHAT_WORKS

_COMPILERS = ("gcc", "clang")  # that Triton looks for (triton/runtime/build.py)
_PROGRAM = Path(__file__).with_name("use_gpu.py")
_ON_CPU = "set slurm.gpus_per_node: 0 to compute on the CPU"


def check_gpus(ranks_here: int, local_rank: int = 0, environ: Mapping[str, str] = os.environ) -> str | None:
    """Uses the GPU of this rank and returns its UUID; None for ranks that compute on CPUs, by the launcher's choice.

    Raises UserError for a fault of the job or its environment, NodeError for a node that lacks a GPU, or whose GPU
    fails or does not answer.
    """
    if env.RLHPC_GPU_SECONDS not in environ:
        return None
    where, visible = f"node {node_name()}", visible_gpus(environ)
    if visible is not None and visible < ranks_here:
        shown = f"{env.CUDA_VISIBLE_DEVICES}={environ[env.CUDA_VISIBLE_DEVICES]}"
        raise UserError(
            f"a rank sees {visible} of the node's GPUs ({shown}), but vLLM needs it to see one for each of the "
            f"{ranks_here} ranks there",
            where=where,
            remedy=f"submit with {WHAT_WORKS}" + ("" if visible else f", or {_ON_CPU}"),
        )
    check_installed_driver(where)
    uuid = _use_gpu(ranks_here, local_rank, environ, where)
    check_compiler(where, environ)
    return uuid


def claim_gpu(uuid: str, local_rank: int, folder: str) -> None:
    """Records the rank of a GPU in ``folder``, which the ranks of an attempt on this node share. Raises UserError if
    another rank has taken it."""
    file = Path(folder) / f"gpu-{uuid}"
    try:
        with open(file, "x") as claim:
            claim.write(str(local_rank))
        return
    except FileExistsError:
        other = file.read_text()
    if other != str(local_rank):
        raise UserError(
            f"ranks {other or '?'} and {local_rank} of the node have the same GPU, {uuid}: they see the node's GPUs in "
            "different orders",
            where=f"node {node_name()}",
            remedy=f"submit with {WHAT_WORKS}",
        )


def _use_gpu(ranks_here: int, local_rank: int, environ: Mapping[str, str], where: str) -> str:
    """Runs a program that uses the GPU. It may never end, not even by a signal."""
    seconds = float(environ[env.RLHPC_GPU_SECONDS])
    output = os.memfd_create("gpus")
    with open(output, "r+b") as file:
        command = [sys.executable, "-I", "-S", str(_PROGRAM), str(local_rank)]
        program = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(seconds)
        if program.poll() is None:
            program.kill()  # not waited for: a call in the driver ends when the device answers
        file.seek(0)
        found = _parse(file.read())
    uuids = found.get("uuids", [])
    given = env.CUDA_VISIBLE_DEVICES in environ or env.SLURM_GPUS_ON_NODE in environ
    if found.get("missing") and not given and not gpu_devices():  # Slurm need not know a node's GPUs
        raise UserError(
            "the job has no GPUs from Slurm, and the node neither GPUs nor a driver, but ranks are to compute on GPUs",
            where=where,
            remedy=f"submit with {WHAT_WORKS}, or {_ON_CPU}",
        )
    if "uuids" in found and len(uuids) < ranks_here:
        raise _node_error(where, f"CUDA finds {len(uuids)} usable GPUs for {ranks_here} ranks")
    named = f"GPU {local_rank} ({uuids[local_rank]})" if local_rank < len(uuids) else "the driver"
    if "error" in found:
        raise _node_error(where, f"{named} fails: {found['error']}" if uuids else f"no GPU is usable: {found['error']}")
    if program.returncode is None:
        raise _node_error(where, f"{named} does not answer within {seconds:g} s")
    if "used" not in found:
        raise _node_error(where, f"{named} ends a program that uses it (exit code {program.returncode})")
    return str(uuids[local_rank])


def _node_error(where: str, what: str) -> NodeError:
    return NodeError(what, where=where, remedy=f"exclude the node, or {_ON_CPU}")


def _parse(output: bytes) -> dict[str, Any]:
    """All fields that the program has printed."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    return found


def check_gpu_software() -> None:
    """Raises UserError if this machine's GPUs lack a suitable driver or a compiler."""
    if gpu_count():
        check_installed_driver("this machine")
        check_compiler("this machine")


def check_compiler(where: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises UserError without a C compiler: Triton builds the launcher of each kernel with one, minutes later."""
    named = environ.get(env.CC)
    path = environ.get(env.PATH)
    if any(shutil.which(name, path=path) for name in ((named.split() or [""])[:1] if named else _COMPILERS)):
        return
    what = f"{env.CC}={named} is not a program" if named else f"no C compiler ({' or '.join(_COMPILERS)}) in PATH"
    raise UserError(
        f"{what}; Triton needs one for vLLM's kernels",
        where=where,
        remedy=f"load a module with one (slurm.modules), or set {env.CC} in slurm.environment",
    )
