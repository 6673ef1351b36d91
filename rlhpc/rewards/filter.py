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
_ARGUMENT_BYTES = 8
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000  # users, files, processes, network, IPC, control groups, host name
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SCHED_CORE = 1, 4, 62
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOL_SOCKET, _O_ASYNC = 1, 0x2000
# Commands of fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX (signals to other processes), F_SETLEASE (delays others that open a
# file), F_NOTIFY, F_SETPIPE_SZ (memory). F_SETFL is denied with O_ASYNC only.
_FCNTL_NEVER, _F_SETFL = (8, 10, 15, 1024, 1026, 1031), 4
# FIOSETOWN, SIOCSPGRP, FIOASYNC (signals to other processes), TIOCSTI, TIOCLINUX (input to terminals).
_IOCTL_NEVER = (0x8901, 0x8902, 0x5452, 0x5412, 0x541C)
_BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE: memory that no limit counts
_FIRST_PROCESS = 1  # of a namespace: ours, and of the same user
_FIRST_UNKNOWN = 451  # calls of Linux 6.5 and later, not examined: a program sees an older kernel
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
    "inotify_init",
    "inotify_init1",
    "fanotify_init",
    "io_setup",
    "vmsplice",  # a byte in a pipe keeps a page of 2 MiB
    "landlock_create_ruleset",
    "syslog",
    "sync",
    "syncfs",
    # Objects of the user's other processes, which are found by their numbers.
    "shmat",
    "shmctl",
    "semop",
    "semtimedop",
    "semctl",
    "msgsnd",
    "msgrcv",
    "msgctl",
    "mq_open",
    "mq_unlink",
)
_NEW_PROCESS = ("fork", "vfork")
_OTHERS = (
    "pidfd_open",
    "pidfd_getfd",
    "pidfd_send_signal",
    "process_madvise",
    "process_mrelease",
    "kcmp",
    "migrate_pages",
    "move_pages",
    "sendmsg",  # files in transit cannot be measured
    "sendmmsg",
)
_SIGNALS = ("kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_OF_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr")
_OF_KIND = {"setpriority": 0, "ioprio_set": 1}  # calls whose first argument says what the second one is: a process


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
        "memfd_create 319 memfd_secret 447 prctl 157 "
        "pidfd_open 434 pidfd_getfd 438 process_madvise 440 process_mrelease 448 kcmp 312 migrate_pages 256 "
        "move_pages 279 prlimit64 302 sched_setaffinity 203 sched_setparam 142 sched_setscheduler 144 "
        "sched_setattr 314 setpriority 141 ioprio_set 251 fcntl 72 ioctl 16 setsockopt 54 inotify_init 253 "
        "inotify_init1 294 fanotify_init 300 io_setup 206 vmsplice 278 landlock_create_ruleset 444 syslog 103 sync 162 "
        "syncfs 306 shmat 30 shmctl 31 semop 65 semtimedop 220 semctl 66 msgsnd 69 msgrcv 70 msgctl 71 mq_open 240 "
        "mq_unlink 241 sendmsg 46 sendmmsg 307 fallocate 285",
    ),
    "aarch64": _table(
        0xC00000B7,
        "ptrace 117 process_vm_readv 270 process_vm_writev 271 add_key 217 request_key 218 keyctl 219 bpf 280 "
        "perf_event_open 241 userfaultfd 282 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 unshare 97 "
        "setns 268 mount 40 open_by_handle_at 265 socket 198 clone 220 clone3 435 kill 129 tgkill 131 tkill 130 "
        "pidfd_send_signal 424 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 umount2 39 pivot_root 41 "
        "fsopen 430 fspick 433 open_tree 428 move_mount 429 mount_setattr 442 shmget 194 semget 190 msgget 186 "
        "memfd_create 279 memfd_secret 447 prctl 167 "
        "pidfd_open 434 pidfd_getfd 438 process_madvise 440 process_mrelease 448 kcmp 272 migrate_pages 238 "
        "move_pages 239 prlimit64 261 sched_setaffinity 122 sched_setparam 118 sched_setscheduler 119 "
        "sched_setattr 274 setpriority 140 ioprio_set 30 fcntl 25 ioctl 29 setsockopt 208 inotify_init1 26 "
        "fanotify_init 262 io_setup 0 vmsplice 75 landlock_create_ruleset 444 syslog 116 sync 81 syncfs 267 shmat 196 "
        "shmctl 195 semop 193 semtimedop 192 semctl 191 msgsnd 189 msgrcv 188 msgctl 187 mq_open 180 mq_unlink 181 "
        "sendmsg 211 sendmmsg 269 fallocate 47",
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

    ``alone``: without namespaces the filter also denies new processes, every call that acts on another process, and the
    network.
    """
    table = _TABLES.get(platform.machine())
    if table is None:
        return None
    numbers = table.numbers
    steps = [_Step(_LOAD, _MACHINE), _Step(_EQUAL, table.machine, yes=1), _deny(errno.EPERM)]
    steps += [_Step(_LOAD, _NUMBER)]
    steps += [_Step(_AT_LEAST, _FIRST_UNKNOWN, no=1), _deny(errno.ENOSYS)]  # the x32 ABI of x86_64 too
    for name in (*_NEVER, *((*_NEW_PROCESS, *_OTHERS) if alone else ())):
        if name in numbers:
            steps += [_Step(_EQUAL, numbers[name], no=1), _deny(errno.EPERM)]
    families = () if alone else (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
    steps += _only_with(numbers["socket"], families, errno.EAFNOSUPPORT)
    # The flags of clone3 are in memory, which a filter cannot read: libc falls back to clone.
    steps += [_Step(_EQUAL, numbers["clone3"], no=1), _deny(errno.ENOSYS)]
    spaces = [_load(0), _Step(_ANY_BIT, _CLONE_NAMESPACES, no=1), _deny(errno.EPERM)]
    steps += _when(numbers["clone"], spaces)
    # The program must end with its parent, and share no core with processes of its choice. Without namespaces it must
    # stay measurable.
    never = (_PR_SET_PDEATHSIG, _PR_SCHED_CORE, *((_PR_SET_DUMPABLE,) if alone else ()))
    steps += _when(numbers["prctl"], _unless(0, never))
    steps += _files_and_sockets(numbers)
    steps += _other_processes(numbers) if alone else _when(numbers["prlimit64"], _unless(0, (_FIRST_PROCESS,)))
    return b"".join(step.packed() for step in [*steps, _Step(_RETURN, _ALLOW)])


def _files_and_sockets(numbers: dict[str, int]) -> list[_Step]:
    """Denies what acts on others through files that they share with the program, and unlimited memory of sockets."""
    signals = [_load(1), _Step(_EQUAL, _F_SETFL, no=3), _load(2), _Step(_ANY_BIT, _O_ASYNC, no=1), _deny(errno.EPERM)]
    buffers = [_load(1), _Step(_EQUAL, _SOL_SOCKET, no=1 + 2 * len(_BUFFERS)), *_unless(2, _BUFFERS)]
    return [
        *_when(numbers["fcntl"], [*_unless(1, _FCNTL_NEVER), *signals]),
        *_when(numbers["ioctl"], _unless(1, _IOCTL_NEVER)),
        *_when(numbers["setsockopt"], buffers),
    ]


def _other_processes(numbers: dict[str, int]) -> list[_Step]:
    """Denies processes, calls on any process but the present one, and space beyond the end of a file."""
    own = os.getpid()
    threads = [_load(0), _Step(_ANY_BIT, _CLONE_THREAD, yes=1), _deny(errno.EAGAIN)]
    steps = _when(numbers["clone"], threads)
    steps += _when(numbers["fallocate"], [_load(1), _Step(_EQUAL, 0, yes=1), _deny(errno.EOPNOTSUPP)])
    for name in _SIGNALS:
        steps += _only_with(numbers[name], (own,), errno.EPERM)
    for name in _OF_PROCESS:
        steps += _only_with(numbers[name], (0, own), errno.EPERM)
    for name, process in _OF_KIND.items():
        kind = [_load(0), _Step(_EQUAL, process, yes=1), _deny(errno.EPERM)]
        which = [_load(1), _Step(_EQUAL, 0, yes=2), _Step(_EQUAL, own, yes=1), _deny(errno.EPERM)]
        steps += _when(numbers[name], [*kind, *which])
    return steps


def _deny(number: int) -> _Step:
    return _Step(_RETURN, _ERRNO | number)


def _load(argument: int) -> _Step:
    """Loads the low half of a call's argument, counted from 0."""
    return _Step(_LOAD, _ARGUMENT + _ARGUMENT_BYTES * argument)


def _unless(argument: int, values: Iterable[int]) -> list[_Step]:
    """Denies one of the values of an argument."""
    return [_load(argument), *(s for value in values for s in (_Step(_EQUAL, value, no=1), _deny(errno.EPERM)))]


def _when(number: int, steps: Sequence[_Step]) -> list[_Step]:
    """Steps for one system call; reloads the call's number after them."""
    return [_Step(_EQUAL, number, no=len(steps) + 1), *steps, _Step(_LOAD, _NUMBER)]


def _only_with(number: int, values: Iterable[int], error: int) -> list[_Step]:
    """Allows one system call only if its first argument is one of the values."""
    wanted = list(values)
    checks = [_Step(_EQUAL, value, yes=len(wanted) - index) for index, value in enumerate(wanted)]
    return _when(number, [_load(0), *checks, _deny(error)])
