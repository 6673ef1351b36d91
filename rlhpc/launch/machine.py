"""Resources of this machine, its GPUs and their driver, and the environment of its ranks. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from rlhpc.checkpoint.formats.described import resolve_backend
from rlhpc.config.schema import RANKS_KEY, RunConfig, ranks_are_set, with_ranks
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.plan.estimates.hardware import read_site
from rlhpc.sharding.placement import Backend, backend_of

# Below Linux's ephemeral ports (32768 on), from which an outgoing connection could take the port before we do.
_PORTS = range(20000, 30000)


# A healthy GPU answers in seconds, also on a busy node that loads its driver; one that is stuck never does.
GPU_CHECK_SECONDS = 120
_DEVICES = Path("/dev")
_TRAINS = {"megatron": "megatron", "fsdp": "transformers"}  # package of each back end's models
# Minimum driver for any minor version of a CUDA major version: table 1 of
# docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html.
LEAST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
_PACKAGES = ("torch", "vllm")
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gpu_count() -> int:
    """Number of NVIDIA GPUs visible to a process started here."""
    devices, visible = gpu_devices(), visible_gpus(os.environ)
    return devices if visible is None else min(devices, visible)


def gpu_devices() -> int:
    """Number of NVIDIA GPUs of this machine."""
    return sum(file.name.removeprefix("nvidia").isdecimal() for file in _DEVICES.glob("nvidia*"))


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """Number of GPUs in CUDA_VISIBLE_DEVICES; None if it is unset and hides none.

    Counted as CUDA does, up to the first name that is not a device: -1, or Slurm's NoDevFiles of a job without GPUs.
    """
    visible = environ.get(env.CUDA_VISIBLE_DEVICES)
    if visible is None:
        return None
    names = (name.strip() for name in visible.split(","))
    return sum(1 for _ in takewhile(lambda name: name and name[0] != "-" and name != "NoDevFiles", names))


def with_local_ranks(config: RunConfig) -> tuple[RunConfig, str | None]:
    """The configuration with a rank per visible GPU, or one on the CPU, and a line on it; unchanged and without a line
    if it sets the number of ranks."""
    if ranks_are_set(config):
        return config, None
    gpus = gpu_count()
    found = f"{gpus} rank(s), one per visible GPU" if gpus else "1 rank on the CPU, no GPU is visible"
    return with_ranks(config, max(1, gpus)), f"{found} ({RANKS_KEY} is not set)"


def check_resources(config: RunConfig) -> None:
    """Raises UserError for a run that one machine cannot start."""
    if config.slurm.most_nodes > 1:
        raise UserError(
            f"`rlhpc run` starts ranks on this machine only, not on {config.slurm.most_nodes} nodes",
            where="slurm.nodes",
            remedy="set it to 1, or start the run with `rlhpc submit`",
        )
    resources = config.resources
    gpus = gpu_count()
    if 0 < gpus < resources.ranks_per_node:
        raise UserError(
            f"{resources.ranks_per_node} ranks on {gpus} GPU(s)",
            where="resources.ranks_per_node",
            remedy=f"use at most {gpus}, or set {env.CUDA_VISIBLE_DEVICES}= to run on the CPU",
        )


def missing_packages(config: RunConfig) -> list[str]:
    """Packages that the run's ranks need and this Python lacks. Nothing is imported."""
    return [name for name in ("torch", _TRAINS[_backend(config)], "vllm") if find_spec(name) is None]


def _backend(config: RunConfig) -> Backend:
    try:
        return resolve_backend(config)
    except UserError:  # the model may have yet to be made
        return backend_of(config)


def check_packages(config: RunConfig) -> None:
    """Raises UserError if this Python cannot start the run's ranks."""
    if missing := missing_packages(config):
        raise UserError(
            f"{', '.join(missing)} not installed",
            where=sys.executable,
            remedy="use an environment that has them (README, Install), or submit the run to Slurm with `rlhpc submit`",
        )


def package_warnings(config: RunConfig) -> list[str]:
    """Warnings for a job whose ranks start with this Python, which lacks packages that they need."""
    missing = [] if config.slurm.other_python else missing_packages(config)
    text = f"slurm.conda: {sys.executable}, which the job starts its ranks with, has no {', '.join(missing)}"
    return [f"{text}; name an environment that has them, or use slurm.container"] if missing else []


def check_profile_tools(config: RunConfig) -> None:
    """Raises UserError for tools of the section profile that ranks on this machine would lack."""
    if faults := _missing_tools(config, gpus=gpu_count() > 0):
        raise UserError("; ".join(faults), where="profile.tools", remedy="install what is missing, or name other tools")


def profile_warnings(config: RunConfig) -> list[str]:
    """Warnings of tools of the section profile that this Python and PATH lack: ranks may run elsewhere."""
    gpus = config.slurm.gpus_per_node != 0
    if config.slurm.other_python:
        return []
    return [f"profile.tools: {fault}" for fault in _missing_tools(config, gpus=gpus)]


def _missing_tools(config: RunConfig, *, gpus: bool) -> list[str]:
    on_gpu = [tool for tool in config.profile.tools if tool != "torch"]
    found = [f"there is no GPU for {', '.join(on_gpu)}"] if on_gpu and not gpus else []
    return found + (["nsys is not installed here"] if "nsys" in on_gpu and shutil.which("nsys") is None else [])


def rank_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of every rank on this machine."""
    resources, gpus = config.resources, gpu_count() > 0
    threads = resources.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // resources.ranks_per_node)
    settings = common_environment("127.0.0.1", free_port(), threads, gpus=gpus)
    settings |= backend_environment(config, gpus=gpus)
    if gpus:
        settings[env.RLHPC_GPU_SECONDS] = gpu_check_seconds()
    if any(name == "lo" for _, name in socket.if_nameindex()):
        settings[env.GLOO_SOCKET_IFNAME] = "lo"
    return settings


def gpu_check_seconds() -> str:
    """Time in seconds in which each rank's GPU must answer before its node counts as bad."""
    return os.environ.get(env.RLHPC_GPU_SECONDS, str(GPU_CHECK_SECONDS))


def common_environment(master: str, port: int, threads: int, *, gpus: bool) -> dict[str, str]:
    """Environment variables of ranks on any machine. ``port``: a free one on ``master``, for stores of libraries."""
    return {
        env.MASTER_ADDR: master,
        env.MASTER_PORT: str(port),
        env.OMP_NUM_THREADS: str(threads),
        env.HF_HUB_OFFLINE: "1",
        env.TOKENIZERS_PARALLELISM: "false",
        env.CUDA_DEVICE_MAX_CONNECTIONS if gpus else env.TORCHDYNAMO_DISABLE: "1",
    }


def backend_environment(config: RunConfig, *, gpus: bool) -> dict[str, str]:
    """Environment variables by which the run's back end differs from ``common_environment``."""
    if gpus and _backend(config) == "fsdp":  # CUDA's default: with a single queue, gathers would wait for computation
        return {env.CUDA_DEVICE_MAX_CONNECTIONS: "8"}
    blocks = _backend(config) == "fsdp" and config.train.compile == "blocks"
    return {env.TORCHDYNAMO_DISABLE: "0"} if not gpus and (blocks or config.rollout.compile) else {}


def free_port() -> int:
    """A free port."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port among 100 of {_PORTS}")


def needed_cuda() -> str | None:
    """Newest CUDA version that this Python's wheels were built for, such as 13.0; None if they need none.

    From the local tag of a version (2.11.0+cu130), else from torch/version.py, else from NVIDIA's runtime wheel.
    Nothing is imported.
    """
    found = [tagged for name in _PACKAGES if (tagged := _tagged_cuda(_version(name) or ""))]
    if not found and (noted := _noted_cuda()):
        found.append(noted)
    if not found and _version("torch") and not (_version("torch") or "").endswith("+cpu"):
        runtimes = (_version(name) for name in _RUNTIMES)
        found = [".".join(text.split(".")[:2]) for text in runtimes if text]
    return max(found, key=_numbers, default=None)


def installed_driver() -> str | None:
    """Version of this machine's NVIDIA driver, such as 570.86.15; None without one."""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)*)", _DRIVER_FILE.read_text())
        return match[1] if match else None
    return None


def too_old(driver: str, cuda: str) -> str | None:
    """Minimum driver for wheels of this CUDA version if ``driver`` is older; None if it is new enough.

    A driver runs every minor version of the CUDA major version that it was made for, and all earlier ones.
    """
    major = _numbers(cuda)[0]
    least = LEAST_DRIVERS.get(major)
    return least if least is not None and _numbers(driver) < _numbers(least) else None


def check_installed_driver(where: str) -> None:
    """Raises UserError if this machine's driver cannot run this Python's wheels. ``where`` names the machine."""
    driver, cuda = installed_driver(), needed_cuda()
    if driver is None or cuda is None:
        return
    least = too_old(driver, cuda)
    # The library may be newer than the driver: NVIDIA's package for forward compatibility, as containers have it.
    if least is not None and _library_cuda() < _numbers(cuda)[0]:
        raise _refusal(driver, cuda, least, where)


def check_planned_driver(config: RunConfig) -> None:
    """Raises UserError for GPUs whose driver, by the site file, cannot run the wheels of the ranks' Python.

    The Python of a conda environment, an archive or a container is unknown here; the node check covers it.
    """
    name = config.slurm.gpu_type or config.planning.gpu
    if name is None or config.slurm.gpus_per_node == 0 or config.slurm.other_python:
        return
    gpu, cuda = read_site(config).find(name), needed_cuda()
    if gpu is None or not gpu.driver or cuda is None:
        return
    if (least := too_old(gpu.driver, cuda)) is not None:
        where = f"site.gpus.{gpu.name}.driver"
        raise _refusal(gpu.driver, cuda, least, where)


def _refusal(driver: str, cuda: str, least: str, where: str) -> UserError:
    runs = max((major for major in LEAST_DRIVERS if too_old(driver, str(major)) is None), default=None)
    wheels = f", or install wheels of PyTorch and vLLM built for CUDA {runs}" if runs is not None else ""
    return UserError(
        f"NVIDIA driver {driver} is too old for the installed wheels, built for CUDA {cuda}, which needs {least}",
        where=where,
        remedy=f"update the driver, load NVIDIA's cuda-compat package for CUDA {_numbers(cuda)[0]}{wheels}",
    )


def _library_cuda() -> int:
    """Major CUDA version of the driver's library; 0 if unknown."""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
            return number.value // 1000
    return 0


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _tagged_cuda(text: str) -> str | None:
    """CUDA version of a local tag: 13.0 for 2.11.0+cu130, 12.9 for 0.25.0+cu129."""
    match = re.search(r"\+cu(\d+)(\d)\b", text)
    return f"{match[1]}.{match[2]}" if match else None


def _noted_cuda() -> str | None:
    """``cuda`` of torch/version.py: wheels from PyPI have no tag."""
    spec = find_spec("torch")
    with contextlib.suppress(OSError):
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            match = re.search(r"^cuda\b[^=\n]*= *['\"](\d+\.\d+)", text, re.M)
            return match[1] if match else None
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
