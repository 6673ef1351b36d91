"""Calls of Linux that Python 3.11 has no names for."""

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
_SECCOMP_MODE_FILTER = 2
_KEYCTL_JOIN_SESSION_KEYRING = 1

# statvfs says by these bits what a mount must keep when it is mounted anew.
_KEPT = {
    1: MS_RDONLY,
    2: MS_NOSUID,
    4: MS_NODEV,
    8: MS_NOEXEC,
    1024: MS_NOATIME,
    2048: MS_NODIRATIME,
    4096: MS_RELATIME,
}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203}
_KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271}
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. Lost when the user changes."""
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def gain_no_rights() -> None:
    """Neither this process nor its children gain rights by executing a program, setuid or other."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls(program: bytes) -> None:
    """Let system calls through a filter from now on, for this process and its children; gain_no_rights goes before."""
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0)


def forget_keys() -> None:
    """Leave the session's keyring, which may hold tickets of Kerberos."""
    with contextlib.suppress(OSError):  # a kernel without keys has none to forget
        _system_call(_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, None)


def unshare_all() -> None:
    """New namespaces for users, files, processes (of the children), network, IPC and host name."""
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _call("unshare", kinds)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    try:
        _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} at {target})") from None


def make_read_only(target: str) -> None:
    """Of one bind mount, which keeps all else that was said of it."""
    has = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in _KEPT.items() if has & bit)
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def change_root(folder: str) -> None:
    """Make the mount at ``folder`` the root, with nothing left of the former one."""
    os.chdir(folder)
    try:
        _system_call(_PIVOT_ROOT, b".", b".")
        _call("umount2", b".", _MNT_DETACH)
    except OSError:  # a node whose root is its initramfs
        mount(".", "/", flags=MS_MOVE)
        os.chroot(".")
    os.chdir("/")


def _call(name: str, *arguments: int | bytes | None) -> int:
    """A function of the C library that returns -1 and sets errno when it fails."""
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def _system_call(numbers: Mapping[str, int], *arguments: int | bytes | None) -> int:
    machine = platform.machine()
    if machine not in numbers:
        raise OSError(38, f"not known on {machine}")
    return _call("syscall", numbers[machine], *arguments)
