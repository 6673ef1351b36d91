"""Files that a program in namespaces sees: which, and how they are mounted into its root."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhpc.rewards import kernel

# Mount point of the new root. Every Linux has it, and nothing shown to the program lies below it.
ROOT = "/proc"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def shown_paths(prefixes: Sequence[str], libraries: str, paths: Sequence[str]) -> list[str]:
    """Absolute paths of the interpreter's files, devices and ``paths``, as far as they exist."""
    every = [*_SYSTEM, *prefixes, *interpreter_libraries(), *libraries.split(":"), *paths, *_DEVICES]
    return _outermost([path for path in every if os.path.isabs(path) and os.path.lexists(path)])


def show(paths: Sequence[str], own: Sequence[str], inner: list[str]) -> None:
    """Binds ``paths``, with the mount points ``inner``, into the new root, read-only. Hides sockets and FIFOs below
    ``own``, the user's further paths: a read-only mount does not prevent their use."""
    for path in paths:
        _show(path, inner)
    for path in own:
        for special in _sockets_and_fifos(path):
            kernel.mount("/dev/null", ROOT + special, flags=kernel.MS_BIND)


def interpreter_libraries() -> list[str]:
    """Folders of the shared libraries that the interpreter has loaded, such as an installation in an unusual place. Not
    folders that hold more, such as the user's home with a preloaded library."""
    with open("/proc/self/maps") as file:
        files = {line.split(maxsplit=5)[5].strip() for line in file if "/lib" in line and ".so" in line}
    folders = {os.path.dirname(path) for path in files if not path.startswith(f"{sys.prefix}/")}
    owns = [
        os.path.join(os.path.realpath(path), "")
        for path in (os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir())
    ]
    return sorted(folder for folder in folders if not any(own.startswith(os.path.join(folder, "")) for own in owns))


def _outermost(paths: list[str]) -> list[str]:
    """The paths that are not below another of them."""
    real = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in real if not any(path.startswith(f"{other}/") for other in real)]


def mount_points(paths: Sequence[str]) -> list[str]:
    """Mount points of this process at or below the paths."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if any(point.startswith(f"{path}/") for path in paths)]


def _show(path: str, inner: list[str]) -> None:
    """Binds ``path`` into the new root, read-only."""
    target = ROOT + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        return os.symlink(os.readlink(path), target)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    kernel.mount(path, target, flags=kernel.MS_BIND | kernel.MS_REC)
    if path not in _DEVICES:
        for point in (path, *(point for point in inner if point.startswith(f"{path}/"))):
            kernel.make_read_only(ROOT + point)


def _sockets_and_fifos(path: str) -> list[str]:
    """Below a path, or itself. Not in folders that this process may not read: its program may not read them either."""
    found = [path] if os.path.lexists(path) and _is_special(os.lstat(path).st_mode) else []
    waiting = [path]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and _is_special(
                    entry.stat(follow_symlinks=False).st_mode
                ):
                    found.append(entry.path)
    return found


def _is_special(mode: int) -> bool:
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)
