"""Command lines and environment of ranks in a container: Apptainer, Singularity, or Pyxis with Enroot.

Ranks see the image, the mounts of ``container_mounts`` and nothing of the user's home folder. Variables of the job are
passed on as these runtimes do, but those that name files of the node; what the configuration and the launcher set takes
precedence over the image. No value of a variable is on a command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.jobs import ContainerSection
from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.plan.checks.user_code import import_paths

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
_MOST_FILES = 8  # in one folder; with more, the folder is mounted
_SYSTEM = ("/", "/etc", "/home", "/opt", "/root", "/run", "/usr", "/usr/local", "/var")  # an image has its own
# Characters between the parts of mounts; Enroot's are lines of a file.
_SEPARATORS = {"apptainer": ":,", "singularity": ":,", "pyxis": ":, \t\n"}


def pyxis_options(config: RunConfig, run: Path, ours: Collection[str]) -> list[str]:
    """Options of srun; none for other runtimes. ``ours``: names of the variables that the launcher sets."""
    container = config.slurm.container
    if container is None or container.runtime != "pyxis":
        return []
    mounts = ",".join(mount.full for mount in _mounts(config, run))
    # A line of Enroot's file of variables cannot hold a value of several.
    names = sorted(name for name in _forced(config, ours) if "\n" not in config.slurm.environment.get(name, ""))
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
    mounts = (mount.source if mount.is_plain else mount.full for mount in _mounts(config, run))
    gpu = [] if config.slurm.gpus_per_node == 0 else ["--nv"]
    place = ["--no-home", *(word for mount in mounts for word in ("--bind", mount)), "--pwd", str(Path.cwd())]
    return [program_of(container), "exec", *gpu, *place, *container.options, _image(container)]


def program_of(container: ContainerSection) -> str:
    """Program of Apptainer or Singularity: that of the runtime, or for apptainer the other one if only that is
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
    """Environment of srun for ranks in a container; ``environment`` itself without one. ``ours``: names of the
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
    """True unless it is Apptainer under its former name."""
    found = shutil.which(program)
    return program == "singularity" and not (found and os.path.basename(os.path.realpath(found)) == "apptainer")


def _mounts(config: RunConfig, run: Path) -> tuple[Mount, ...]:
    return container_mounts(config, run, Path.cwd(), os.environ)


def _image(container: ContainerSection) -> str:
    """The image; a file by its absolute path, as srun takes another word for an address."""
    return os.path.abspath(container.image) if os.path.exists(container.image) else container.image


@dataclass(frozen=True)
class Mount:
    """Mount of ``source`` on the node at ``inside`` in the container. ``key`` of the configuration names it; ``flags``:
    the user's, such as ro."""

    source: str
    inside: str
    key: str
    flags: str = ""

    @property
    def is_plain(self) -> bool:
        """True if it is at its own path, writable as on the node."""
        return self.source == self.inside and not self.flags

    @property
    def full(self) -> str:
        """The mount as SOURCE:INSIDE[:FLAGS]."""
        return ":".join(filter(None, (self.source, self.inside, self.flags)))


def container_mounts(config: RunConfig, run: Path, workdir: Path, environ: Mapping[str, str]) -> tuple[Mount, ...]:
    """Mounts of ``config``, parents first: run folder, working folder, every path of the configuration with what its
    links lead to, own code on PYTHONPATH, the node's TMPDIR, and slurm.container.mounts, which take precedence. Raises
    UserError for a path that no runtime can mount."""
    assert config.slurm.container is not None
    own = [_at(run, "run_dir"), *_config_mounts(config)]
    own += [_at(folder, "PYTHONPATH") for folder in code_folders(config, workdir, environ)]
    own += [_at(workdir, "the working folder")] if str(workdir) not in _SYSTEM else []
    own += _tmpdir(environ, config.slurm.container)
    users = _users(config.slurm.container)
    separators = _SEPARATORS[config.slurm.container.runtime]
    for mount in (*own, *users):
        if sign := next((sign for sign in separators if sign in mount.source + mount.inside), ""):
            raise UserError(
                f"{mount.source!r} cannot be mounted into a container: it contains {sign!r}",
                where=mount.key,
                remedy="rename it",
            )
    return _arranged(users, own)


def code_folders(config: RunConfig, workdir: Path, environ: Mapping[str, str]) -> list[str]:
    """Folders of PYTHONPATH with modules that the configuration names and the working folder lacks."""
    packages = dict.fromkeys(path.split(":")[0].split(".")[0] for _, path in import_paths(config))
    entries = [os.path.abspath(entry) for entry in environ.get(env.PYTHONPATH, "").split(os.pathsep) if entry]
    found = []
    for package in packages:
        places = (folder for folder in (str(workdir), *entries) if _has(folder, package))
        found += [folder for folder in [next(places, str(workdir))] if folder != str(workdir)]
    return list(dict.fromkeys(found))


def _has(folder: str, package: str) -> bool:
    return os.path.isfile(f"{folder}/{package}.py") or os.path.isdir(f"{folder}/{package}")


def _at(path: Path | str, key: str) -> Mount:
    place = os.path.abspath(path)
    return Mount(place, place, key)


def _users(container: ContainerSection) -> list[Mount]:
    parts = [(*text.split(":", 2), "", "")[:3] for text in container.mounts]
    return [
        Mount(os.path.normpath(source), os.path.normpath(inside or source), "slurm.container.mounts", flags)
        for source, inside, flags in parts
    ]


def _config_mounts(config: RunConfig) -> list[Mount]:
    """Mounts of every path that the configuration names, and of the files that links in such a folder lead to."""
    named = list(config_paths(config))
    count = Counter(path.parent for _, path in named)
    mounts = []
    for key, path in named:
        folder = path.parent
        whole = count[folder] > _MOST_FILES and path.suffix and str(folder) not in _SYSTEM and not _holds_home(folder)
        mounts.append(_at(folder if whole else path, key))
        mounts += _behind_links(path, key)
        if key == "model.weights" and os.path.isfile(folder / "state.json"):
            mounts.append(_at(folder / "state.json", key))  # the run's step, for an evaluation
    return mounts


def config_paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Key and absolute path of each path in the configuration, but the run folder."""
    yield from _walk(config.model_dump(exclude={"site", "run_dir"}), "")


def _walk(node: Any, key: str) -> Iterator[tuple[str, Path]]:
    if isinstance(node, Path):
        yield key, node.absolute()
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, value in items:
        yield from _walk(value, f"{key}.{name}" if key else str(name))


def _holds_home(folder: Path) -> bool:
    return Path(os.path.expanduser("~")).is_relative_to(folder)


def _behind_links(folder: Path, key: str) -> list[Mount]:
    """Mounts of the targets of links in a folder, as in the snapshots of HuggingFace's cache: at the place where such a
    link leads to in the container."""
    found: dict[Mount, None] = {}
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)) if folder.is_dir() else []:
            link = folder / entry
            if not link.is_symlink() or not link.exists():
                continue
            source, inside = os.path.realpath(link), os.path.normpath(folder / os.readlink(link))
            if Path(inside).is_relative_to(folder):
                continue
            if os.path.basename(source) == os.path.basename(inside) and os.path.isfile(source):
                source, inside = os.path.dirname(source), os.path.dirname(inside)
            found[Mount(source, inside, key)] = None
    return list(found)


def _tmpdir(environ: Mapping[str, str], container: ContainerSection) -> list[Mount]:
    """Mount of the folder above TMPDIR, which all nodes have; TMPDIR itself may be missing on some. Apptainer and
    Singularity mount /tmp and /var/tmp themselves."""
    given = environ.get(env.TMPDIR, "")
    if not os.path.isabs(given) or not os.path.isdir(given):
        return []
    above = Path(os.path.abspath(given)).parent
    alone = str(above) in _SYSTEM or _holds_home(above)
    mount = _at(given if alone else above, env.TMPDIR)
    return [] if container.runtime != "pyxis" and mount.inside in ("/tmp", "/var/tmp") else [mount]


def _arranged(users: Sequence[Mount], own: Sequence[Mount]) -> tuple[Mount, ...]:
    """All mounts, parents before their contents, without own ones that another shows already."""
    taken = {mount.inside for mount in users}
    rest = [*users, *(mount for mount in own if mount.inside not in taken)]
    mounts: list[Mount] = []
    while rest:
        rest.sort(key=lambda mount: len(Path(mount.inside).parts))
        mount = rest.pop(0)
        above = next((one for one in reversed(mounts) if Path(mount.inside).is_relative_to(one.inside)), None)
        if mount in users or above is None or not above.is_plain:
            mounts.append(mount)
            continue
        real = os.path.realpath(mount.source)
        seen = os.path.join(os.path.realpath(above.source), os.path.relpath(mount.inside, above.inside))
        if real == os.path.normpath(seen):
            continue
        if mount.is_plain and real != mount.source:  # a link in the parent leads to it
            rest.append(Mount(real, real, mount.key))
        else:
            mounts.append(mount)
    return tuple(mounts)
