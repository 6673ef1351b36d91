"""Checks the needs of a rank on its node, before anything heavy is imported. Torch-free.

Without it, each fault would appear minutes later, as a hang or an error that names neither node nor cause. A rank whose
job step shares its node with others of the job also takes its own cores: Slurm may give such steps the same ones.
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
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.storage import kind_of, patiently
from rlhpc.core.store_client import StoreAddress, reach
from rlhpc.launch.worker.node_folders import node_error, set_caches, set_tmpdir
from rlhpc.launch.worker.node_gpu import check_gpus, claim_gpu

_SHM_BYTES_PER_RANK = 16 << 20  # an engine over two ranks was seen to take 4 MiB of each, NCCL takes more
_MEMLOCK_BYTES = 1 << 30
_INFINIBAND, _SHM = Path("/dev/infiniband"), Path("/dev/shm")
_SIOCGIFCONF = 0x8912
_ANYWHERE = "198.51.100.1"  # a documentation address: nothing is sent, only the route is looked up
_TOPOLOGY = Path("/sys/devices/system/cpu")
# The store listens before the ranks start. A connection takes milliseconds, or seconds if a packet is lost.
_CONNECT_SECONDS = 15.0


def check_node(
    run_dir: Path,
    master_host: str,
    *,
    ranks_here: int = 1,
    local_rank: int = 0,
    attempt: int = 1,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Raises NodeError for a fault of this node, and UserError for one that every node would have; fixes what it can,
    with a line on stderr.

    Sets TMPDIR, and may change the cache folders in ``environ`` and this process's memlock limit. ``ranks_here``:
    number of ranks on this node; ``local_rank``: of this one; the first one tests whether ``run_dir`` is writable.
    """
    first_here = local_rank == 0
    for host in dict.fromkeys((socket.gethostname(), master_host)):
        _address(host)
    _check_run_folder(run_dir, write=first_here)
    _check_locked_memory()
    if ranks_here > 1:
        _check_shared_memory(ranks_here)
    gpu = check_gpus(ranks_here, local_rank, environ)
    job = environ.get(env.SLURM_JOB_ID, str(os.getppid()))
    caches = set_tmpdir(environ, job, attempt, log=first_here, ranks=ranks_here)
    set_caches(environ, caches, log=first_here)
    if gpu is not None:
        claim_gpu(gpu, local_rank, environ[env.TMPDIR])


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
    raise node_error(
        f"cannot determine which of its interfaces ({', '.join(others) or 'none has an IPv4 address'}) leads to the"
        f" other nodes: {master_host!r} is {_address(master_host)} here",
        "name it in slurm.interface",
    )


def interface_address(name: str) -> str | None:
    """First IPv4 address of this node's interface, None if it has none."""
    return next((address for address, own in _interfaces().items() if own == name), None)


def _address(host: str) -> str:
    """First IPv4 address of a host. Raises NodeError without one."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        own = " (this node's own name)" if host == socket.gethostname() else ""
        raise node_error(
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
        raise node_error(f"the run folder {str(folder)!r} does not exist", remedy) from None
    except OSError as error:
        if kind_of(error) == "full":
            raise  # a full disk is not a fault of the node
        raise node_error(f"the run folder {str(folder)!r} is not writable ({error.strerror})", remedy) from None


def _check_locked_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard == resource.RLIM_INFINITY or hard >= _MEMLOCK_BYTES:
        return
    with contextlib.suppress(OSError):
        if any(_INFINIBAND.iterdir()):
            raise node_error(
                f"only {hard >> 10} KiB of memory may be locked, but InfiniBand needs no limit",
                "submit with `ulimit -l unlimited`, or have the administrators set LimitMEMLOCK=infinity for slurmd",
            )


def _check_shared_memory(ranks: int) -> None:
    needed = ranks * _SHM_BYTES_PER_RANK
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        raise node_error(f"{_SHM} is not available ({error.strerror})", "mount a tmpfs there") from None
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise node_error(
            f"{free >> 20} MiB are free in {_SHM}, but {ranks} ranks need {needed >> 20}",
            "enlarge it (in a container: its option for shared memory), or remove files of earlier jobs",
        )


def _local_address(target: str) -> str | None:
    """Source address of packets to ``target``; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))
        except OSError:
            return None
        return str(sock.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Interface by IPv4 address, of interfaces that are up, with secondary addresses."""
    data = array.array("B", bytes(64 << 10))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(data), data.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, request))[0]
    size = 40  # struct ifreq: a name of 16 bytes, a sockaddr_in, padding
    entries = [data[start : start + size].tobytes() for start in range(0, used, size)]
    return {socket.inet_ntoa(one[20:24]): one[:16].rstrip(b"\0").decode().partition(":")[0] for one in entries}


def take_own_cores(local_rank: int, ranks_here: int, environ: Mapping[str, str] = os.environ) -> None:
    """Binds this process, and all that it starts, to its share of the cores that the job has on this node; does nothing
    where the launcher did not ask for it, or where there are fewer cores than ranks."""
    if env.RLHPC_OWN_CORES not in environ:
        return
    mine = own_share(cores_of(os.sched_getaffinity(0)), local_rank, ranks_here)
    if mine:
        with contextlib.suppress(OSError):  # slower, not wrong
            os.sched_setaffinity(0, mine)


def cores_of(cpus: Iterable[int], folder: Path = _TOPOLOGY) -> list[list[int]]:
    """The hardware threads of each core among ``cpus``, cores of a socket in a row."""
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        place = folder / f"cpu{cpu}" / "topology"
        try:
            key = (int((place / "physical_package_id").read_text()), int((place / "core_id").read_text()))
        except (OSError, ValueError):
            key = (0, cpu)
        found.setdefault(key, []).append(cpu)
    return [found[key] for key in sorted(found)]


def own_share(cores: Sequence[Sequence[int]], local_rank: int, ranks_here: int) -> set[int]:
    """Hardware threads of a rank: ranks get equally many whole cores, in their order; the rest has none. Empty if there
    are fewer cores than ranks."""
    count = len(cores) // ranks_here
    return {cpu for core in cores[local_rank * count : (local_rank + 1) * count] for cpu in core}


def check_store(environ: Mapping[str, str] = os.environ, seconds: float = _CONNECT_SECONDS) -> None:
    """Raises StoreError if the store that the launcher has named cannot be reached. Passes without one."""
    text, secret = environ.get(env.RLHPC_STORE), environ.get(env.RLHPC_STORE_SECRET)
    if text and secret:
        reach(StoreAddress.parse(text, secret), seconds).close()
