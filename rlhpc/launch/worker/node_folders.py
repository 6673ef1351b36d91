"""Folders of a job on its node: temporary files, and caches of compilers. Torch-free.

Libraries read pickles and shared libraries from fixed names in TMPDIR, such as torchinductor_USER. In a TMPDIR that
others can write to, whoever makes such a folder first runs code in the ranks. Ranks therefore get a private TMPDIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.errors import NodeError
from rlhpc.core.shown import show

# A unix socket's path has 107 characters at most, of which vLLM's own names take 37 and Python's pools 32.
LONGEST_TMPDIR = 60
_OLD_SECONDS = 7 * 86400.0
_COMPILERS = {
    env.TORCHINDUCTOR_CACHE_DIR: "inductor",
    env.TRITON_CACHE_DIR: "triton",
    env.CUDA_CACHE_PATH: "cuda",
    env.FLASHINFER_WORKSPACE_BASE: "flashinfer",
}
_CACHES = {**_COMPILERS, env.XDG_CACHE_HOME: "cache"}
_held: list[int] = []


def set_tmpdir(environ: MutableMapping[str, str], job: str, *, log: bool) -> str:
    """Keeps TMPDIR if it is usable and private, else sets it to a private folder of ``job``: in it, or in /tmp.

    All attempts of a job have the same folder, which keeps their caches. Raises NodeError if there can be none.
    """
    given = environ.get(env.TMPDIR, "")
    why = _unusable(given) if given else ""
    if given and not why and _is_private(given):
        return given
    name = f"rlhpc-{os.getuid()}-{job}"
    top = given if given and not why else "/tmp"
    if top != "/tmp" and len(f"{top}/{name}") > LONGEST_TMPDIR:
        why, top = f"is shared, and too long for a private folder in it (at most {LONGEST_TMPDIR})", "/tmp"
    if log:
        _remove_old_folders(Path(top))
    own = _own_folder(top, name)
    environ[env.TMPDIR] = own
    tempfile.tempdir = None  # Python caches it
    if why and log:
        _warn(f"TMPDIR {given!r} {why}; {own} is used instead")
    return own


def set_caches(environ: MutableMapping[str, str], *, log: bool) -> None:
    """Puts the cache of torch's compiler into TMPDIR, and all other caches if the home folder is not writable.

    Keeps caches that are set, but not compilers' caches that another user may have made or can make: torch sets its
    variable itself, to the fixed name in TMPDIR, and a job inherits it from the process that submits it.
    """
    for name, part in _COMPILERS.items():
        given = environ.get(name)
        if given and _others_can_make(Path(given).absolute()):
            environ[name] = f"{environ[env.TMPDIR]}/{part}"
            if log:
                _warn(f"{name} {given!r} may be another user's; {environ[name]} is used instead")
    environ.setdefault(env.TORCHINDUCTOR_CACHE_DIR, f"{environ[env.TMPDIR]}/inductor")
    home = environ.get(env.HOME, "")
    why = _not_writable(home) if home else "is not set"
    if not why:
        return
    for name, part in _CACHES.items():
        environ.setdefault(name, f"{environ[env.TMPDIR]}/{part}")
    if log:
        _warn(f"the home folder {home!r} {why}; caches go to {environ[env.TMPDIR]}")


def hold(folder: str) -> None:
    """Keeps a job's folder from being removed as an old one while this process runs."""
    if not Path(folder).name.startswith("rlhpc-"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(folder)


def node_error(what: str, remedy: str) -> NodeError:
    """Error of this node."""
    return NodeError(what, where=f"node {socket.gethostname()}", remedy=remedy)


def _warn(what: str) -> None:
    show(f"rlhpc: node {socket.gethostname()}: {what}", file=sys.stderr)


def _unusable(folder: str) -> str:
    """Why the folder is unusable for temporary files; empty if it is usable."""
    if len(folder) > LONGEST_TMPDIR:
        return f"is too long for unix sockets ({len(folder)} characters, at most {LONGEST_TMPDIR})"
    return _not_writable(folder)


def _not_writable(folder: str) -> str:
    if not os.path.isdir(folder):
        return "does not exist"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"is not writable ({error.strerror})"


def _is_private(folder: str) -> bool:
    """Whether no other user can make files in it."""
    found = os.stat(folder)
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _others_can_make(path: Path) -> bool:
    """Whether another user has made the folder where anyone can, or can make it."""
    try:
        while not path.exists():
            path = path.parent
        found, above = path.stat(), path.parent.stat()
    except OSError:  # not for us to look at
        return True
    in_shared = bool(above.st_mode & stat.S_IWOTH)
    return bool(found.st_mode & stat.S_IWOTH) or (in_shared and found.st_uid not in (os.getuid(), 0))


def _own_folder(top: str, name: str) -> str:
    """Private folder ``name`` in ``top``, or a new one if another user has taken the name."""
    path = f"{top}/{name}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not ours:
            path = tempfile.mkdtemp(prefix="rlhpc-", dir=top)
        why = _not_writable(path)
    except OSError as error:
        why = f"cannot be created ({error.strerror})"
    if why:
        raise node_error(f"{path} {why}", "set TMPDIR in slurm.environment to a local folder of the node")
    return path


def _remove_old_folders(top: Path) -> None:
    """Removes folders of this user's old jobs, with their caches, unless a process holds them."""
    for path in top.glob(f"rlhpc-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _OLD_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
