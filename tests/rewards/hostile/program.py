"""What a hostile program is, and the names that every program has."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

# Reasons for which the page does not promise to contain a program under ``isolation: filter``.
REASONS = {
    "reads": "it reads files that the user can read",
    "writes": "it writes files that the user can write",
    "leaves": "it leaves files in folders that the user can write",
    "forges": "it can read the expected values in the user's files",
}

TRIED = "TRIED"
ESCAPED = "ESCAPED"

_X86 = (
    "ptrace 101 process_vm_readv 310 process_vm_writev 311 add_key 248 request_key 249 keyctl 250 bpf 321 "
    "perf_event_open 298 userfaultfd 323 io_uring_setup 425 unshare 272 setns 308 mount 165 umount2 166 "
    "pivot_root 155 open_by_handle_at 304 clone 56 clone3 435 pidfd_open 434 pidfd_getfd 438 pidfd_send_signal 424 "
    "rt_sigqueueinfo 129 tgkill 234 process_madvise 440 kcmp 312 migrate_pages 256 move_pages 279 ioprio_set 251 "
    "inotify_init1 294 fanotify_init 300 io_setup 206 fsopen 430 open_tree 428 mount_setattr 442 memfd_secret 447 "
    "syslog 103 swapon 167 reboot 169 init_module 175 settimeofday 164 sethostname 170 acct 163 iopl 172 "
    "vhangup 153 personality 135 vmsplice 278 shmat 30 shmctl 31 semctl 66 semop 65 msgsnd 69 msgrcv 70 msgctl 71 "
    "shmget 29 semget 64 msgget 68 mq_open 240 exit 60 getpid 39 kexec_load 246 capset 126 capget 125 quotactl 179 "
    "process_mrelease 448 fallocate 285 setuid 105 landlock_create_ruleset 444 syncfs 306 sched_setattr 314"
)
_ARM = (
    "ptrace 117 process_vm_readv 270 process_vm_writev 271 add_key 217 request_key 218 keyctl 219 bpf 280 "
    "perf_event_open 241 userfaultfd 282 io_uring_setup 425 unshare 97 setns 268 mount 40 umount2 39 pivot_root 41 "
    "open_by_handle_at 265 clone 220 clone3 435 pidfd_open 434 pidfd_getfd 438 pidfd_send_signal 424 "
    "rt_sigqueueinfo 138 tgkill 131 process_madvise 440 kcmp 272 migrate_pages 238 move_pages 239 ioprio_set 30 "
    "inotify_init1 26 fanotify_init 262 io_setup 0 fsopen 430 open_tree 428 mount_setattr 442 memfd_secret 447 "
    "syslog 116 swapon 224 reboot 142 init_module 105 settimeofday 170 sethostname 161 acct 89 vhangup 58 "
    "personality 92 vmsplice 75 shmat 196 shmctl 195 semctl 191 semop 193 msgsnd 189 msgrcv 188 msgctl 187 "
    "shmget 194 semget 190 msgget 186 mq_open 180 exit 93 getpid 172 kexec_load 104 capset 91 capget 90 "
    "quotactl 60 process_mrelease 448 fallocate 47 setuid 146 landlock_create_ruleset 444 syncfs 267 "
    "sched_setattr 274"
)
_WORDS = (_ARM if platform.machine() == "aarch64" else _X86).split()
NUMBERS = dict(zip(_WORDS[::2], map(int, _WORDS[1::2]), strict=True))  # of system calls

_HEADER = f"""
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
globals().update({{around!r}})
NR = {NUMBERS!r}
def call(name, *given):
    "A system call; raises an OSError."
    result = libc.syscall(ctypes.c_long(NR[name]), *(ctypes.c_long(g) if isinstance(g, int) else g for g in given))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def escaped(what):
    print("{ESCAPED}", what, flush=True)
def attempt(what):
    try:
        return what()
    except (OSError, MemoryError, ValueError, subprocess.SubprocessError, RuntimeError):
        return None
def grow(number):
    file = open(f"{{number}}", "w+b")
    file.write(bytes(4 << 20))
    file.flush()
    return file
def forbidden(what, *allowed):
    "Reports an escape if a call succeeds, or fails for another reason than that it is refused."
    try:
        value = what()
    except OSError as error:
        if allowed and error.errno not in allowed:
            escaped(str(error))
    except subprocess.SubprocessError:
        pass
    else:
        escaped(repr(value)[:100])
"""


@dataclass(frozen=True)
class Program:
    """A hostile program.

    ``finishes``: it prints that it has tried everything; others end as their limits demand. ``alone``: it disturbs
    programs in the same sandbox. ``within``: wall-clock limit. ``most_mib``: memory of the machine that it may take.
    ``unpromised``: key of ``REASONS``. ``landlock``: it promises
    that only on a kernel with Landlock.
    """

    name: str
    text: str
    finishes: bool = True
    alone: bool = False
    within: float = 20.0
    most_mib: int | None = None
    unpromised: str = ""
    landlock: bool = False
    limits: dict[str, Any] = field(default_factory=dict)

    def source(self, around: dict[str, Any]) -> str:
        end = f"\nprint({TRIED!r}, {self.name!r}, flush=True)\n" if self.finishes else "\n"
        return header(around) + self.text + end


@dataclass(frozen=True)
class Response:
    """A response that tries to pass tests without solving their task; its score must be 0."""

    name: str
    text: str
    tests: Any
    unpromised: str = "forges"
    landlock: bool = False


def header(around: dict[str, Any]) -> str:
    return _HEADER.replace("{around!r}", repr(around))


def joined(programs: list[Program], around: dict[str, Any]) -> str:
    """One program that runs several, each with names of its own."""
    texts = [(program.name, program.source(around)) for program in programs]
    return f"""
import os
folder = os.getcwd()
for name, text in {texts!r}:
    try:
        os.chdir(folder)
        exec(compile(text, name, "exec"), {{"__name__": "__main__"}})
    except BaseException as error:
        print("FAILED", name, type(error).__name__, error, flush=True)
"""
