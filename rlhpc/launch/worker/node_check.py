"""Checks what a rank needs of its node, before anything heavy is imported. Torch-free.

Without it, each fault would appear minutes later, as a hang or an error that names neither node nor cause.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.errors import NodeError
from rlhpc.core.shown import show
from rlhpc.core.storage import kind_of, patiently
from rlhpc.launch.worker.node_gpu import check_gpus

# A unix socket's path has 107 characters at most, of which vLLM's own names take 37 and Python's pools 32.
LONGEST_TMPDIR = 60
_SHM_BYTES_PER_RANK = 16 << 20  # an engine over two ranks was seen to take 4 MiB of each, NCCL takes more
_MEMLOCK_BYTES = 1 << 30
_OLD_SECONDS = 7 * 86400.0
_INFINIBAND, _SHM = Path("/dev/infiniband"), Path("/dev/shm")
_CACHES = {
    env.XDG_CACHE_HOME: "cache",
    env.TRITON_CACHE_DIR: "triton",
    env.CUDA_CACHE_PATH: "cuda",
    env.FLASHINFER_WORKSPACE_BASE: "flashinfer",
}
_SIOCGIFCONF = 0x8912
_ANYWHERE = "198.51.100.1"  # a documentation address: nothing is sent, only the route is looked up


def check_node(
    run_dir: Path,
    master_host: str,
    *,
    ranks_here: int = 1,
    first_here: bool = True,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Raises NodeError for what cannot work on this node, and UserError for what would fail on every node; fixes what
    it can, with a line on stderr.

    May change TMPDIR and the cache folders in ``environ``, and this process's memlock limit. ``ranks_here``: number of
    ranks on this node; ``first_here``: true on the one that tests whether ``run_dir`` is writable.
    """
    for host in dict.fromkeys((socket.gethostname(), master_host)):
        _address(host)
    _check_run_folder(run_dir, write=first_here)
    _check_locked_memory()
    if ranks_here > 1:
        _check_shared_memory(ranks_here)
    check_gpus(ranks_here, environ)
    _set_tmpdir(environ, log=first_here)
    _set_caches(environ, log=first_here)


def network_interface(master_host: str, *, single_node: bool = False) -> str:
    """Interface by which this node reaches ``master_host``, for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.

    On the master itself, the one with the master's address. Raises NodeError if it cannot be determined.
    """
    if single_node:
        return "lo"
    names = _interfaces()
    ways = [_local_address(_address(master_host)), _local_address(_ANYWHERE)]
    for address in ways:
        if address is not None and not address.startswith("127.") and address in names:
            return names[address]
    others = sorted({name for address, name in names.items() if not address.startswith("127.")})
    if len(others) == 1:
        return others[0]
    raise _error(
        f"cannot determine which of its interfaces ({', '.join(others) or 'none has an IPv4 address'}) leads to the"
        f" other nodes: {master_host!r} is {_address(master_host)} here",
        "name it in slurm.interface",
    )


def interface_address(name: str) -> str | None:
    """First IPv4 address of this node's interface, None if it has none."""
    return next((address for address, own in _interfaces().items() if own == name), None)


def _error(what: str, remedy: str) -> NodeError:
    return NodeError(what, where=f"node {socket.gethostname()}", remedy=remedy)


def _warn(what: str) -> None:
    show(f"rlhpc: node {socket.gethostname()}: {what}", file=sys.stderr)


def _address(host: str) -> str:
    """First IPv4 address of a host. Raises NodeError without one."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        own = " (this node's own name)" if host == socket.gethostname() else ""
        raise _error(
            f"the host name {host!r}{own} has no address here ({error.strerror})",
            "have the administrators add it to the node's /etc/hosts or DNS, or exclude the node",
        ) from None
    return str(found[0][4][0])


def _check_run_folder(folder: Path, *, write: bool) -> None:
    remedy = "put run_dir on a file system that all nodes share and can write to"

    def look() -> None:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if write:
            with tempfile.TemporaryFile(dir=folder):
                pass
        elif not os.access(folder, os.W_OK | os.X_OK):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number))

    try:
        patiently(look, folder)
    except FileNotFoundError:
        raise _error(f"the run folder {str(folder)!r} does not exist", remedy) from None
    except OSError as error:
        if kind_of(error) == "full":
            raise  # a full disk is not a fault of the node
        raise _error(f"the run folder {str(folder)!r} is not writable ({error.strerror})", remedy) from None


def _check_locked_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= _MEMLOCK_BYTES:
        return
    with contextlib.suppress(OSError):
        if any(_INFINIBAND.iterdir()):
            raise _error(
                f"only {hard >> 10} KiB of memory may be locked, but InfiniBand needs no limit",
                "submit with `ulimit -l unlimited`, or have the administrators set LimitMEMLOCK=infinity for slurmd",
            )


def _check_shared_memory(ranks: int) -> None:
    needed = ranks * _SHM_BYTES_PER_RANK
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        raise _error(f"{_SHM} is not available ({error.strerror})", "mount a tmpfs there") from None
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise _error(
            f"{free >> 20} MiB are free in {_SHM}, but {ranks} ranks need {needed >> 20}",
            "enlarge it (in a container: its option for shared memory), or remove files of earlier jobs",
        )


def _set_tmpdir(environ: MutableMapping[str, str], *, log: bool) -> None:
    """Keeps TMPDIR if it is usable, else sets it to a folder of the job in /tmp."""
    given = environ.get(env.TMPDIR, "")
    why = _unusable(given) if given else ""
    if given and not why:
        return
    if log:
        _remove_old_folders()
    own = _own_folder(f"rlhpc-{os.getuid()}-{environ.get(env.SLURM_JOB_ID, os.getppid())}")
    environ[env.TMPDIR] = own
    tempfile.tempdir = None  # Python caches it
    if why and log:
        _warn(f"TMPDIR {given!r} {why}; {own} is used instead")


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


def _own_folder(name: str) -> str:
    """Private folder /tmp/``name``, or a new one if another user has taken the name."""
    path = f"/tmp/{name}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not ours:
            path = tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp")
        why = _not_writable(path)
    except OSError as error:
        why = f"cannot be created ({error.strerror})"
    if why:
        raise _error(f"{path} {why}", "set TMPDIR in slurm.environment to a local folder of the node")
    return path


def _remove_old_folders() -> None:
    """Removes empty folders of this user's old jobs. A rank cannot remove its own: others may still need it."""
    for path in Path("/tmp").glob(f"rlhpc-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _OLD_SECONDS:
                path.rmdir()


def _set_caches(environ: MutableMapping[str, str], *, log: bool) -> None:
    """Puts caches into TMPDIR if the home folder is not writable."""
    home = environ.get(env.HOME, "")
    why = _not_writable(home) if home else "is not set"
    if not why:
        return
    for name, part in _CACHES.items():
        environ.setdefault(name, f"{environ[env.TMPDIR]}/{part}")
    if log:
        _warn(f"the home folder {home!r} {why}; caches go to {environ[env.TMPDIR]}")


def _local_address(target: str) -> str | None:
    """Source address of packets to ``target``; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))
        except OSError:
            return None
        return str(sock.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Interface by IPv4 address."""
    return {address: name.partition(":")[0] for name, address in _addresses()}


def _addresses() -> Iterator[tuple[str, str]]:
    """(interface, IPv4 address) of interfaces that are up, with secondary addresses."""
    data = array.array("B", bytes(64 << 10))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(data), data.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, request))[0]
    size = 40  # struct ifreq: a name of 16 bytes, a sockaddr_in, padding
    for start in range(0, used, size):
        entry = data[start : start + size].tobytes()
        yield entry[:16].rstrip(b"\0").decode(), socket.inet_ntoa(entry[20:24])
