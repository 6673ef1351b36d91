"""Linux system calls without a wrapper in Python 3.11."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
from collections.abc import Mapping

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_MOVE = 32, 1024, 2048, 4096, 8192
MS_REC, MS_PRIVATE, MS_RELATIME = 1 << 14, 1 << 18, 1 << 21
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_CAPABILITIES = 64  # of any kernel
_CAPABILITY_VERSION = 0x20080522
_SECCOMP_MODE_FILTER = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1

# Flags of statvfs that a remount must repeat.
_MOUNT_FLAGS = {
    1: MS_RDONLY,
    2: MS_NOSUID,
    4: MS_NODEV,
    8: MS_NOEXEC,
    1024: MS_NOATIME,
    2048: MS_NODIRATIME,
    4096: MS_RELATIME,
}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # of every processor
_LANDLOCK_VERSION = 1
_LANDLOCK_DEVICES = 1 << 6 | 1 << 11  # making character and block devices
_LANDLOCK_WRITE, _LANDLOCK_MOVE = 1 << 1, 1 << 13  # to files; between folders, from version 2
_LANDLOCK_BELOW = 1  # a rule for all files below a path
_LANDLOCK_SCOPES = 0b11  # abstract sockets and signals, from version 6
_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Undone by a change of user."""
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def gain_no_rights() -> None:
    """Prevents this process and its children from gaining privileges by executing a program, such as setuid ones."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls(program: bytes) -> None:
    """Applies a filter to the system calls of this process and its children. Requires ``gain_no_rights`` before."""
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0)


def bound_capabilities() -> None:
    """Prevents this process and its children from regaining capabilities by executing a program."""
    for capability in range(_CAPABILITIES):
        with contextlib.suppress(OSError):  # unknown, or this process may not change the set: then it has none to drop
            if _call("prctl", _PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
                _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    """Gives up every capability."""
    _call("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))  # effective, permitted, inheritable


def forget_keys() -> None:
    """Leaves the session's keyring, which may hold Kerberos tickets."""
    with contextlib.suppress(OSError):  # a kernel without keyrings
        _system_call(_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, None)


def enter_domain() -> None:
    """Takes from this process and its children the access to memory and environment of
    other processes, writing to files in /proc, and signals to others. Requires ``gain_no_rights`` before."""
    with contextlib.suppress(OSError):  # a kernel without Landlock
        version = _call("syscall", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
        allowed = _LANDLOCK_WRITE | (_LANDLOCK_MOVE if version >= 2 else 0)
        # Devices are not made by programs anyway.
        rules = struct.pack("QQQ", _LANDLOCK_DEVICES | allowed, 0, _LANDLOCK_SCOPES)
        rules = rules if version >= 6 else rules[:8]
        domain = _call("syscall", _LANDLOCK_CREATE, rules, len(rules), 0)
        for name in set(os.listdir("/")) - {"proc"}:
            with contextlib.suppress(OSError):
                _allow_below(domain, f"/{name}", allowed)
        _call("syscall", _LANDLOCK_RESTRICT, domain, 0)
        os.close(domain)


def _allow_below(domain: int, path: str, allowed: int) -> None:
    """Allows what a domain denies elsewhere, as far as permissions do."""
    top = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed &= -1 if os.path.isdir(path) else _LANDLOCK_WRITE
        _call("syscall", _LANDLOCK_ADD, domain, _LANDLOCK_BELOW, struct.pack("=Qi", allowed, top), 0)
    finally:
        os.close(top)


def unshare_all() -> None:
    """Creates namespaces for users, mounts, processes (of the children), network, IPC and host name."""
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _call("unshare", kinds)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    try:
        _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} at {target})") from None


def make_read_only(target: str) -> None:
    """Makes one bind mount read-only; its other flags stay."""
    present = os.statvfs(target).f_flag
    flags = sum(flag for bit, flag in _MOUNT_FLAGS.items() if present & bit)
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | flags)


def change_root(folder: str) -> None:
    """Makes the mount at ``folder`` the root, and detaches the old root."""
    os.chdir(folder)
    try:
        _system_call(_PIVOT_ROOT, b".", b".")
        _call("umount2", b".", _MNT_DETACH)
    except OSError:  # the root is an initramfs, which cannot be pivoted
        mount(".", "/", flags=MS_MOVE)
        os.chroot(".")
    os.chdir("/")


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Calls a function of the C library that returns -1 and sets errno on failure."""
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def _system_call(numbers: Mapping[str, int], *arguments: int | bytes | None) -> int:
    machine = platform.machine()
    if machine not in numbers:
        raise OSError(38, f"system call unknown on {machine}")
    return _call("syscall", numbers[machine], *arguments)
