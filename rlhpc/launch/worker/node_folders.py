"""Folders of a job on its node: temporary files, and caches of compilers. Torch-free.

Libraries read pickles and shared libraries from fixed names in TMPDIR, such as torchinductor_USER. In a TMPDIR that
others can write to, whoever makes such a folder first runs code in the ranks. Ranks therefore get a private TMPDIR:

    TMPDIR/rlhpc-UID-JOB/       private; caches that all attempts of the job use, if TMPDIR is not private
        3-5f0a/                 TMPDIR of the ranks of the third attempt on a node, which hold a lock on it

Killed ranks leave sockets and folders. The next attempt on the node, of any job of this user, removes them: the kernel
has freed their locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.rank import node_name
from rlhpc.core.scratch import is_new, remove, remove_unheld
from rlhpc.core.shown import show

# A unix socket's path has 107 characters at most, of which vLLM's own names take 37, Python's pools 32, and the folder
# of an attempt 10.
LONGEST_TMPDIR = 60
_OLD_SECONDS = 7 * 86400.0
_MAKE_SECONDS = 10.0  # in which others may be removing a folder that is made
_LOOK_SECONDS = 0.02
_COMPILERS = {
    env.TORCHINDUCTOR_CACHE_DIR: "inductor",
    env.TRITON_CACHE_DIR: "triton",
    env.CUDA_CACHE_PATH: "cuda",
    env.FLASHINFER_WORKSPACE_BASE: "flashinfer",
}
_CACHES = {**_COMPILERS, env.XDG_CACHE_HOME: "cache"}
_held: dict[str, int] = {}  # descriptors by folder
# A rank's compiled kernels, sockets and folders of reward programs; caches that grow need more.
_BYTES_PER_RANK, _FILES_PER_RANK = 64 << 20, 256


def set_tmpdir(environ: MutableMapping[str, str], job: str, attempt: int, *, log: bool, ranks: int = 1) -> str:
    """Sets TMPDIR to a private folder of an attempt on this node: in TMPDIR, or in /tmp if that is not usable, and
    holds it. Returns the private folder for caches, which all attempts of ``job`` share.

    A private TMPDIR is kept if its path is too long for another folder in it. Raises NodeError if there can be none, or
    none with room for the node's ``ranks``, and UserError if compiled kernels cannot be loaded from there.
    """
    given = environ.get(env.TMPDIR, "")
    why = _unusable(given, ranks, environ) if given else ""
    name = f"rlhpc-{os.getuid()}-{job}"
    private = bool(given and not why and _is_private(given))
    if private and len(f"{given}/{name}") > LONGEST_TMPDIR:
        return given
    top = given if given and not why else "/tmp"
    if top != "/tmp" and len(f"{top}/{name}") > LONGEST_TMPDIR:
        why, top = f"is shared, and too long for a private folder in it (at most {LONGEST_TMPDIR})", "/tmp"
    if not given or why:
        _require_room(top, f"TMPDIR {given!r} {why}, and " if why else "", ranks, environ)
    # A program in a sandbox may be another user's, and must reach its folder in a TMPDIR that it can enter.
    mode = 0o700 | (os.stat(top).st_mode & 0o011 if private else 0)
    node = zlib.crc32(os.uname().nodename.encode()) & 0xFFFF
    own, tmpdir = _held_folders(top, name, f"{attempt % 10000}-{node:04x}", mode)
    if log:
        _remove_old_folders(Path(top))
        _remove_left(Path(top), f"{node:04x}", Path(tmpdir))
    environ[env.TMPDIR] = tmpdir
    tempfile.tempdir = None  # Python caches it
    if why and log:
        _warn(f"TMPDIR {given!r} {why}; {own} is used instead")
    return given if private else own


def set_caches(environ: MutableMapping[str, str], folder: str, *, log: bool) -> None:
    """Puts the cache of torch's compiler into ``folder``, and all other caches if the home folder is not writable. If
    there is none, and in a container, HOME is then a new folder in there.

    Keeps caches that are set, but not compilers' caches that another user may have made or can make: torch sets its
    variable itself, to the fixed name in TMPDIR, and a job inherits it from the process that submits it.
    """
    for name, part in _COMPILERS.items():
        given = environ.get(name)
        if given and _others_can_make(Path(given).absolute()):
            environ[name] = f"{folder}/{part}"
            if log:
                _warn(f"{name} {given!r} may be another user's; {environ[name]} is used instead")
    environ.setdefault(env.TORCHINDUCTOR_CACHE_DIR, f"{folder}/inductor")
    home = environ.get(env.HOME, "")
    why = _not_writable(home) if home else "is not set"
    if not why:
        return
    for name, part in _CACHES.items():
        environ.setdefault(name, f"{folder}/{part}")
    if not os.path.isdir(home) or env.RLHPC_CODE in environ:
        environ[env.HOME] = f"{folder}/home"
        os.makedirs(environ[env.HOME], mode=0o700, exist_ok=True)
    if log:
        _warn(f"the home folder {home!r} {why}; caches go to {folder}")


def hold(tmpdir: str) -> bool:
    """Keeps the folders of a job and its attempt from being removed while this process runs, or until ``release``.
    False if another process is removing one of them."""
    path = Path(tmpdir)
    if not path.parent.name.startswith("rlhpc-"):
        return True
    return all(_hold(str(folder)) for folder in (path.parent, path))


def _hold(folder: str) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be held, nor removed
        return True
    try:
        with contextlib.suppress(OSError):
            os.close(_held.pop(folder, -1))
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(folder)
        held = os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except (BlockingIOError, FileNotFoundError):
        held = False
    except OSError:  # a file system without locks
        held = True
    if held:
        _held[folder] = descriptor
    else:
        os.close(descriptor)
    return held


def release() -> None:
    """Removes the attempt's folder, and the job's if nothing is in it, unless another process holds them."""
    for folder in reversed(_held):
        with contextlib.suppress(OSError):
            fcntl.flock(_held[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if Path(folder).name.startswith("rlhpc-"):
                os.rmdir(folder)
            else:
                remove(folder)
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


def node_error(what: str, remedy: str) -> NodeError:
    """Error that names this node."""
    return NodeError(what, where=f"node {node_name()}", remedy=remedy)


def _warn(what: str) -> None:
    show(f"rlhpc: node {node_name()}: {what}", file=sys.stderr)


def _require_room(top: str, before: str, ranks: int, environ: Mapping[str, str]) -> None:
    """Raises NodeError or UserError if ``top``, the last choice, does not do. ``before``: reason why it is the last."""
    remedy = "set TMPDIR in slurm.environment to a folder of the node that does"
    if why := too_small(top, ranks):
        raise node_error(f"{before}{top} {why}", f"{remedy}, or remove files of earlier jobs")
    if why := not_executable(top, environ):  # as the site mounts it, on every node
        raise UserError(f"{before}{top} {why}", where=f"node {node_name()}", remedy=remedy)


def _unusable(folder: str, ranks: int, environ: Mapping[str, str]) -> str:
    """Reason why the folder is unusable for temporary files; empty if it is usable."""
    if len(folder) > LONGEST_TMPDIR:
        return f"is too long for unix sockets ({len(folder)} characters, at most {LONGEST_TMPDIR})"
    return _not_writable(folder) or too_small(folder, ranks) or not_executable(folder, environ)


def _not_writable(folder: str) -> str:
    if not os.path.isdir(folder):
        return "does not exist"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"is not writable ({error.strerror})"


def _is_private(folder: str) -> bool:
    """True if no other user can make files in it."""
    found = os.stat(folder)
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _others_can_make(path: Path) -> bool:
    """True if another user has made the folder where anyone can, or can make it."""
    try:
        while not path.exists():
            path = path.parent
        found, above = path.stat(), path.parent.stat()
    except OSError:  # not for us to look at
        return True
    in_shared = bool(above.st_mode & stat.S_IWOTH)
    return bool(found.st_mode & stat.S_IWOTH) or (in_shared and found.st_uid not in (os.getuid(), 0))


def _held_folders(top: str, name: str, current: str, mode: int) -> tuple[str, str]:
    """The job's private folder and the attempt's in it, held. Ranks of this node that are ending may remove them as
    long as nobody holds them: they are made again."""
    deadline = time.monotonic() + _MAKE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            own = _own_folder(top, name, mode)
            tmpdir = _own_folder(own, current, mode)
            if hold(tmpdir):
                return own, tmpdir
        time.sleep(_LOOK_SECONDS)
    raise node_error(f"{top}/{name}/{current} is removed again and again", "set TMPDIR in slurm.environment")


def _own_folder(top: str, name: str, mode: int) -> str:
    """Private folder ``name`` in ``top``, or a new one if another user has taken the name. Raises FileNotFoundError if
    another process removes it, or ``top``."""
    path, why = f"{top}/{name}", "cannot be created"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o066
        if not ours:
            path = tempfile.mkdtemp(prefix="rlhpc-", dir=top)
        os.chmod(path, mode)
        why = "is not writable"
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileNotFoundError:
        raise
    except OSError as error:
        remedy = "set TMPDIR in slurm.environment to a local folder of the node"
        raise node_error(f"{path} {why} ({error.strerror})", remedy) from error
    return path


def _remove_left(top: Path, node: str, current: Path) -> None:
    """Removes folders that killed ranks of this user's attempts on this node left; of other jobs unless they are
    new."""
    for job in top.glob(f"rlhpc-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            for folder in job.glob(f"*-{node}"):
                if folder != current:
                    remove_unheld(str(folder), is_new if job != current.parent else lambda found: False)
            if job != current.parent and not is_new(job.lstat()):
                job.rmdir()  # only an empty one


def _remove_old_folders(top: Path) -> None:
    """Removes folders of this user's old jobs, with their caches, unless a process holds them."""
    for path in top.glob(f"rlhpc-{os.getuid()}-*"):
        remove_unheld(str(path), lambda found: time.time() - found.st_mtime < _OLD_SECONDS)


def too_small(folder: str, ranks: int) -> str:
    """Shortage of the folder for the ranks of a node; empty if it has room, or if its file system reports none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    free, needed = found.f_bavail * found.f_frsize, ranks * _BYTES_PER_RANK
    if found.f_blocks and free < needed:
        return f"has only {free >> 20} MiB free of the {needed >> 20} that its ranks need"
    files = ranks * _FILES_PER_RANK
    if found.f_files and found.f_favail < files:
        return f"has room for only {found.f_favail:,} more files"
    return ""


def not_executable(folder: str, environ: Mapping[str, str]) -> str:
    """Reason why kernels compiled in the folder cannot be loaded; empty if they can, or if ranks compile nothing."""
    if env.CUDA_DEVICE_MAX_CONNECTIONS not in environ and environ.get(env.TORCHDYNAMO_DISABLE) != "0":
        return ""  # ranks on CPUs
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return ""
    return "is mounted noexec, so that compiled kernels cannot be loaded" if flags & os.ST_NOEXEC else ""
