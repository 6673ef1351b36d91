"""Command lines and environment of ranks in a container: Apptainer, Singularity, or Pyxis with Enroot.

Ranks see the image, the mounts of ``container_mounts`` and nothing of the user's home folder. Variables of the job are
passed on as these runtimes do, but those that name files of the node; what the configuration and the launcher set takes
precedence over the image. No value of a variable is on a command line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from rlhpc.config.jobs import ContainerSection
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.launch.container_mounts import Mount, code_folders, container_mounts

_RUNTIME, _IMAGE = "slurm.container.runtime", "slurm.container.image"
# Variables that name files of the node. slurm.environment sets them for a container.
_OF_THE_NODE = (
    env.PYTHONPATH, env.PYTHONHOME, env.PYTHONUSERBASE, env.PYTHONSTARTUP, env.LD_PRELOAD, env.CC, env.CXX,
    env.CUDA_HOME, env.SSL_CERT_FILE, env.SSL_CERT_DIR, env.REQUESTS_CA_BUNDLE, env.CURL_CA_BUNDLE,
    env.XDG_RUNTIME_DIR, env.XDG_CACHE_HOME, env.TRITON_CACHE_DIR, env.TORCHINDUCTOR_CACHE_DIR, env.CUDA_CACHE_PATH,
    env.FLASHINFER_WORKSPACE_BASE,
)  # fmt: skip
# Options of Apptainer and Singularity by variable that hide Slurm's variables, processes or folders from the ranks.
_CHANGE_THE_START = ("CLEANENV", "CONTAIN", "CONTAINALL", "HOME", "PID", "PWD", "CWD")
# Without these, Enroot shows no GPU in an image that does not set them.
_ENROOT_GPU = {env.NVIDIA_VISIBLE_DEVICES: "all", env.NVIDIA_DRIVER_CAPABILITIES: "compute,utility"}


def pyxis_options(config: RunConfig, run: Path, ours: Collection[str]) -> list[str]:
    """Options of srun; none for other runtimes. ``ours``: names of the variables that the launcher sets."""
    container = config.slurm.container
    if container is None or container.runtime != "pyxis":
        return []
    mounts = ",".join(mount.full for mount in _mounts(config, run))
    names = sorted(name for name in _forced(config, ours) if _fits_pyxis(config.slurm.environment.get(name, "")))
    return [
        f"--container-image={_image(container)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        f"--container-env={','.join(names)}",
        *container.options,
    ]


def exec_command(config: RunConfig, run: Path) -> list[str]:
    """Words before a rank's program; none without a container, or with Pyxis."""
    container = config.slurm.container
    if container is None or container.runtime == "pyxis":
        return []
    binds = [word for mount in _mounts(config, run) for word in ("--bind", _bind(mount))]
    gpu = [] if config.slurm.gpus_per_node == 0 else ["--nv"]
    place = ["--no-home", *binds, "--pwd", str(Path.cwd())]
    return [program_of(container), "exec", *gpu, *place, *container.options, _image(container)]


def program_of(container: ContainerSection) -> str:
    """The program of Apptainer or Singularity: that of the runtime, or for apptainer the other one if only that is
    installed here."""
    only_other = container.runtime == "apptainer" and not shutil.which("apptainer") and shutil.which("singularity")
    return "singularity" if only_other else str(container.runtime)


def check_runtime(config: RunConfig) -> None:
    """Raises UserError if this node cannot start containers as configured."""
    container = config.slurm.container
    if container is None:
        return
    remedy = "name the runtime of this site (apptainer, singularity or pyxis), or load its module in slurm.modules"
    if container.runtime != "pyxis":
        if shutil.which(program_of(container)) is None:
            names = "neither apptainer nor singularity" if container.runtime == "apptainer" else "no singularity"
            raise UserError(f"{names} is on PATH of node {os.uname().nodename}", where=_RUNTIME, remedy=remedy)
        return
    offered = subprocess.run(["srun", "--help"], capture_output=True, text=True, errors="replace", check=False)
    for option, missing in (("image", "Pyxis is not installed"), ("env", "Pyxis is too old")):
        if offered.returncode == 0 and f"--container-{option}=" not in offered.stdout:
            raise UserError(f"srun has no --container-{option}: {missing}", where=_RUNTIME, remedy=remedy)


def container_warnings(config: RunConfig, run: Path, workdir: Path) -> list[str]:
    """Warnings about the image. Raises UserError for what cannot be mounted."""
    container = config.slurm.container
    if container is None:
        return []
    container_mounts(config, run, workdir, os.environ)
    image = container.image
    if "://" in image and container.runtime != "pyxis":
        return [
            f"{_IMAGE}: {image}: every rank would fetch and convert it; make a file of it once with "
            f"`{container.runtime} pull`, and name that"
        ]
    is_file = image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))
    if is_file and not os.path.exists(workdir / image):
        return [f"{_IMAGE}: {image} is not on this machine; all nodes must see it"]
    return []


def container_environment(config: RunConfig, environment: Mapping[str, str], ours: Collection[str]) -> dict[str, str]:
    """Environment of srun for ranks in a container; ``environment`` as it is without one. ``ours``: names of the
    variables that the launcher sets."""
    container = config.slurm.container
    if container is None:
        return dict(environment)
    meant = config.slurm.environment
    found = {name: value for name, value in environment.items() if name in meant or not _is_of_the_node(name)}
    found[env.PYTHONNOUSERSITE] = "1"
    found[env.RLHPC_CODE] = os.pathsep.join([str(Path.cwd()), *code_folders(config, Path.cwd(), environment)])
    if container.runtime == "pyxis":
        return {**(_ENROOT_GPU if config.slurm.gpus_per_node != 0 else {}), **found}
    prefix = env.SINGULARITYENV if _is_singularity(program_of(container)) else env.APPTAINERENV
    forced = {f"{prefix}{name}": found[name] for name in sorted(_forced(config, ours)) if name in found}
    return {**found, **forced}


def _forced(config: RunConfig, ours: Collection[str]) -> set[str]:
    """Names of variables that take precedence over the image's."""
    own = {env.PYTHONNOUSERSITE, env.RLHPC_CODE, *ours} - {env.SRUN_CPUS_PER_TASK, env.RLHPC_STORE_SECRET}
    if config.slurm.container and config.slurm.container.runtime == "pyxis" and config.slurm.gpus_per_node != 0:
        own |= {*_ENROOT_GPU}
    return own | {name for name in config.slurm.environment if name != env.HOME and not _is_of_a_runtime(name)}


def _is_of_the_node(name: str) -> bool:
    return name in _OF_THE_NODE or (_is_of_a_runtime(name) and name.partition("_")[2] in _CHANGE_THE_START)


def _is_of_a_runtime(name: str) -> bool:
    return name.startswith((env.APPTAINER, env.SINGULARITY, env.APPTAINERENV, env.SINGULARITYENV))


def _is_singularity(program: str) -> bool:
    """Whether it is not Apptainer under its former name."""
    found = shutil.which(program)
    return program == "singularity" and not (found and os.path.basename(os.path.realpath(found)) == "apptainer")


def _fits_pyxis(value: str) -> bool:
    """Whether Enroot's file of variables can hold the value."""
    return "\n" not in value


def _mounts(config: RunConfig, run: Path) -> tuple[Mount, ...]:
    return container_mounts(config, run, Path.cwd(), os.environ)


def _bind(mount: Mount) -> str:
    return mount.source if mount.is_plain else mount.full


def _image(container: ContainerSection) -> str:
    """The image; a file by its absolute path, as srun takes another word for an address."""
    return os.path.abspath(container.image) if os.path.exists(container.image) else container.image
