"""Calls of Linux that Python has no names for."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    """A function of the C library that returns -1 and sets errno when it fails."""
    result = getattr(_libc, name)(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. Lost when the user changes."""
    call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def gain_no_rights() -> None:
    """Neither this process nor its children gain rights by executing a program, setuid or other."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
