"""System-call filter (seccomp, see Linux Documentation/userspace-api/seccomp_filter.rst) as BPF instructions.

It can only deny calls. Processors that are not in the table have no filter.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; of the first argument the low half
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000  # users, files, processes, network, IPC, control groups, host name
_PR_SET_PDEATHSIG = 1
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
# Calls that no solution needs and that have exposed kernel bugs, refer to other processes, or allocate memory that no
# process limit counts.
_NEVER = (
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "add_key",
    "request_key",
    "keyctl",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "fsopen",
    "fspick",
    "open_tree",
    "move_mount",
    "mount_setattr",
    "open_by_handle_at",
    "shmget",
    "semget",
    "msgget",
    "memfd_create",
    "memfd_secret",
)
_NEW_PROCESS = ("fork", "vfork")
_SIGNALS = ("kill", "tgkill", "tkill", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


class _Table(NamedTuple):
    machine: int  # AUDIT_ARCH
    numbers: dict[str, int]


def _table(machine: int, text: str) -> _Table:
    names = iter(text.split())
    return _Table(machine, {name: int(number) for name, number in zip(names, names, strict=True)})


_TABLES = {
    "x86_64": _table(
        0xC000003E,
        "ptrace 101 process_vm_readv 310 process_vm_writev 311 add_key 248 request_key 249 keyctl 250 bpf 321 "
        "perf_event_open 298 userfaultfd 323 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 unshare 272 "
        "setns 308 mount 165 open_by_handle_at 304 socket 41 clone 56 clone3 435 fork 57 vfork 58 kill 62 tgkill 234 "
        "tkill 200 pidfd_send_signal 424 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 umount2 166 pivot_root 155 "
        "fsopen 430 fspick 433 open_tree 428 move_mount 429 mount_setattr 442 shmget 29 semget 64 msgget 68 "
        "memfd_create 319 memfd_secret 447 prctl 157",
    ),
    "aarch64": _table(
        0xC00000B7,
        "ptrace 117 process_vm_readv 270 process_vm_writev 271 add_key 217 request_key 218 keyctl 219 bpf 280 "
        "perf_event_open 241 userfaultfd 282 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 unshare 97 "
        "setns 268 mount 40 open_by_handle_at 265 socket 198 clone 220 clone3 435 kill 129 tgkill 131 tkill 130 "
        "pidfd_send_signal 424 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 umount2 39 pivot_root 41 "
        "fsopen 430 fspick 433 open_tree 428 move_mount 429 mount_setattr 442 shmget 194 semget 190 msgget 186 "
        "memfd_create 279 memfd_secret 447 prctl 167",
    ),
}


@dataclass(frozen=True)
class _Step:
    code: int
    value: int
    yes: int = 0  # instructions to skip if the condition holds
    no: int = 0

    def packed(self) -> bytes:
        return struct.pack("HBBI", self.code, self.yes, self.no, self.value)


def filter_program(*, alone: bool) -> bytes | None:
    """The filter for this process; None on an unknown processor.

    ``alone``: without namespaces the filter also denies new processes, signals to other processes, and the network.
    """
    table = _TABLES.get(platform.machine())
    if table is None:
        return None
    numbers = table.numbers
    steps = [_Step(_LOAD, _MACHINE), _Step(_EQUAL, table.machine, yes=1), _deny(errno.EPERM)]
    steps += [_Step(_LOAD, _NUMBER)]
    if platform.machine() == "x86_64":  # the x32 ABI
        steps += [_Step(_AT_LEAST, 1 << 30, no=1), _deny(errno.ENOSYS)]
    for name in (*_NEVER, *(_NEW_PROCESS if alone else ())):
        if name in numbers:
            steps += [_Step(_EQUAL, numbers[name], no=1), _deny(errno.EPERM)]
    families = () if alone else (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
    steps += _only_with(numbers["socket"], families, errno.EAFNOSUPPORT)
    # The flags of clone3 are in memory, which a filter cannot read: libc falls back to clone.
    steps += [_Step(_EQUAL, numbers["clone3"], no=1), _deny(errno.ENOSYS)]
    spaces = [_Step(_LOAD, _ARGUMENT), _Step(_ANY_BIT, _CLONE_NAMESPACES, no=1), _deny(errno.EPERM)]
    steps += _when(numbers["clone"], spaces)
    # The program must end with its parent.
    outliving = [_Step(_LOAD, _ARGUMENT), _Step(_EQUAL, _PR_SET_PDEATHSIG, no=1), _deny(errno.EPERM)]
    steps += _when(numbers["prctl"], outliving)
    if alone:
        threads = [_Step(_LOAD, _ARGUMENT), _Step(_ANY_BIT, _CLONE_THREAD, yes=1), _deny(errno.EAGAIN)]
        steps += _when(numbers["clone"], threads)
        for name in _SIGNALS:
            steps += _only_with(numbers[name], (os.getpid(),), errno.EPERM)
    return b"".join(step.packed() for step in [*steps, _Step(_RETURN, _ALLOW)])


def _deny(number: int) -> _Step:
    return _Step(_RETURN, _ERRNO | number)


def _when(number: int, steps: Sequence[_Step]) -> list[_Step]:
    """Steps for one system call; reloads the call's number after them."""
    return [_Step(_EQUAL, number, no=len(steps) + 1), *steps, _Step(_LOAD, _NUMBER)]


def _only_with(number: int, values: Iterable[int], error: int) -> list[_Step]:
    """Allows one system call only if its first argument is one of the values."""
    wanted = list(values)
    checks = [_Step(_EQUAL, value, yes=len(wanted) - index) for index, value in enumerate(wanted)]
    return _when(number, [_Step(_LOAD, _ARGUMENT), *checks, _deny(error)])
