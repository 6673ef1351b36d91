"""Checks that ranks can use a node's GPUs: enough visible ones, a driver, a compiler. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.rank import node_name
from rlhpc.launch.driver import check_installed_driver
from rlhpc.launch.machine import gpu_count, gpu_devices, visible_gpus
from rlhpc.launch.slurm.gpu_binding import WHAT_WORKS

_COMPILERS = ("gcc", "clang")  # that Triton looks for (triton/runtime/build.py)


def check_gpus(ranks_here: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raises UserError for what the job or its environment must change, NodeError for a node that lacks a GPU.

    Passes for ranks that compute on CPUs: by the launcher's choice (``common_environment``), without GPUs, or if
    CUDA_VISIBLE_DEVICES hides all of them.
    """
    devices, visible = gpu_devices(), visible_gpus(environ)
    if env.CUDA_DEVICE_MAX_CONNECTIONS not in environ or not devices or visible == 0:
        return
    where = f"node {node_name()}"
    if visible is not None and visible < ranks_here:
        shown = f"{env.CUDA_VISIBLE_DEVICES}={environ[env.CUDA_VISIBLE_DEVICES]}"
        raise UserError(
            f"a rank sees {visible} of the node's GPUs ({shown}), but vLLM needs it to see one for each of the "
            f"{ranks_here} ranks there",
            where=where,
            remedy=f"submit with {WHAT_WORKS}",
        )
    if devices < ranks_here:
        raise NodeError(
            f"{devices} GPUs for {ranks_here} ranks",
            where=where,
            remedy=f"exclude the node, or submit with {WHAT_WORKS}",
        )
    check_installed_driver(where)
    check_compiler(where, environ)


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
