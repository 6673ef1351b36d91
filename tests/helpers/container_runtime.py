"""Stand-in for Apptainer, Singularity and Pyxis: enters an image with bubblewrap, as these runtimes are documented to.

An image is a folder with ``image.json``: host paths that are its files, its environment. A rank sees these read-only,
the mounts of the command line, an empty /tmp, and the home folder unless the command line leaves it out. The image's
environment takes precedence over the host's, and variables that the command line forces over both. GPUs, user
namespaces and the formats of images are not part of it.

``python -m tests.helpers.container_runtime apptainer exec ...`` runs one; ``write_program`` makes a program of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
INSIDE = "/opt/rlhpc"  # rlhpc and its tests in the image
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = f"{INSIDE}:{sysconfig.get_path('purelib')}"
_PROGRAMS = ("apptainer", "singularity")


@dataclass(frozen=True)
class Start:
    """A command in a container, as a runtime understands it. ``forced``: variables that the image does not override."""

    image: Path
    mounts: tuple[str, ...]
    workdir: str
    home: bool
    forced: Mapping[str, str]
    program: tuple[str, ...]


def files_of(python: str) -> dict[str, str]:
    """This machine's system, the interpreter ``python`` and rlhpc with its packages: places in an image by path."""
    # Not the one of a virtual environment, which has no user packages.
    own = {path: path for path in ("/usr", "/etc", sys.prefix, sys.base_prefix, str(Path(python).resolve().parents[1]))}
    return {**own, str(ROOT): INSIDE}


def write_image(folder: Path, python: str, environ: Mapping[str, str]) -> Path:
    """Make an image with ``files_of`` and an environment."""
    folder.mkdir(parents=True)
    known = {"files": files_of(python), "environ": {"PYTHONPATH": _PACKAGES, **environ}}
    (folder / "image.json").write_text(json.dumps(known))
    return folder


def write_folder_image(folder: Path, environ: Mapping[str, str]) -> Path:
    """Make an image for Apptainer itself: a folder, into which the files of ``files_of`` have yet to be mounted."""
    variables = folder / ".singularity.d" / "env"
    for place in (variables, *(folder / name for name in ("dev", "etc", "proc", "sys", "tmp", "usr", "var/tmp"))):
        place.mkdir(parents=True)
    for link in ("bin", "lib", "lib64", "sbin"):
        (folder / link).symlink_to(f"usr/{link}")
    lines = [f"export {name}={value}\n" for name, value in {"PYTHONPATH": _PACKAGES, **environ}.items()]
    (variables / "90-environment.sh").write_text("".join(lines))
    (variables / "99-base.sh").touch()  # after it Apptainer sets the variables that the image does not override
    return folder


def write_program(folder: Path, name: str) -> Path:
    """Make a program of the runtime's name, apptainer or singularity, for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{__file__}" {name} "$@"\n')
    file.chmod(0o755)
    return file


def of_exec(words: Sequence[str], environ: Mapping[str, str]) -> Start:
    """The start that ``apptainer exec`` or ``singularity exec`` makes."""
    name, action, *rest = words
    assert name in _PROGRAMS, words
    assert action == "exec", words
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("--nv", action="store_true")
    parser.add_argument("--no-home", action="store_true")
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--pwd", default=os.getcwd())
    parser.add_argument("image", type=Path)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    known = parser.parse_args(rest)
    prefixes = ("SINGULARITYENV_", "APPTAINERENV_")[: 1 + (name == "apptainer")]
    forced = {key.removeprefix(start): environ[key] for start in prefixes for key in environ if key.startswith(start)}
    return Start(known.image, tuple(known.bind), known.pwd, not known.no_home, forced, tuple(known.program))


def of_srun(words: Sequence[str], environ: Mapping[str, str]) -> Start:
    """The start that Pyxis makes of a task of srun."""
    options, program = [], list(words[1:])
    while program[0].startswith("--"):
        options.append(program.pop(0))
    known = dict(option.split("=", 1) for option in options if option.startswith("--container-"))
    assert "--no-container-entrypoint" in options, "an image's entrypoint would get the rank's program"
    forced = {key: environ[key] for key in known.get("--container-env", "").split(",") if environ.get(key)}
    mounts = tuple(known["--container-mounts"].split(","))
    home = "--no-container-mount-home" not in options
    return Start(Path(known["--container-image"]), mounts, known["--container-workdir"], home, forced, tuple(program))


def bwrap(start: Start, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment that enter the image."""
    image = json.loads((start.image / "image.json").read_text())
    command = ["bwrap", "--tmpfs", "/tmp"]
    for source, inside in image["files"].items():
        command += ["--ro-bind", source, inside]
    for link in ("bin", "lib", "lib64", "sbin"):
        if Path("/", link).is_symlink():
            command += ["--symlink", os.readlink(f"/{link}"), f"/{link}"]
    command += ["--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    home = environ["HOME"]
    command += ["--bind", home, home] if start.home else []
    for mount in start.mounts:
        source, inside, flags = (*mount.split(":"), "", "")[:3]
        command += ["--ro-bind" if flags == "ro" else "--bind", source, inside or source]
    hidden = ("APPTAINER", "SINGULARITY", "LD_LIBRARY_PATH")
    passed = {key: value for key, value in environ.items() if not key.startswith(hidden)}
    variables = {**passed, "PATH": _PATH, **image["environ"], **start.forced, "HOME": home}
    return [*command, "--chdir", start.workdir, "--", *start.program], variables


def main() -> NoReturn:
    """Runs the command as a child, and passes signals on to it as Apptainer's monitor does: all but SIGURG."""
    command, environ = bwrap(of_exec(sys.argv[1:], os.environ), os.environ)
    reading, writing = os.pipe()
    entering = [command[0], "--info-fd", str(writing), *command[1:]]
    with subprocess.Popen(entering, env=environ, pass_fds=[writing]) as process:
        os.close(writing)
        child = json.loads(os.fdopen(reading).read())["child-pid"]
        for number in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGURG}:
            with contextlib.suppress(OSError, ValueError):  # those of the C library
                signal.signal(number, lambda number, _: os.kill(child, number))
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
