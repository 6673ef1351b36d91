"""A file system that fails temporarily, for real processes: their system calls return a selected errno.

seccomp intercepts calls of a process and its children, and this process supplies the results (seccomp_unotify(2)).
Needs no privileges, compiler or mount. ``python -m tests.helpers.failing_storage SOCKET COMMAND...`` runs COMMAND so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER, _NEW_LISTENER = 38, 1, 8
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_AT_FDCWD, _AT_EMPTY_PATH, _FLAGS = -100, 0x1000, 40  # offset of the fourth argument in struct seccomp_data


class _Call(NamedTuple):
    name: str
    folder: int | None  # argument with the descriptor of the path's base folder
    path: int | None  # argument with the path; None: ``folder`` is the file itself


# Numbers on x86_64 and aarch64; 0 if the architecture has no such call.
_CALLS = {
    _Call("open", None, 0): (2, 0),
    _Call("openat", 0, 1): (257, 56),
    _Call("stat", None, 0): (4, 0),
    _Call("lstat", None, 0): (6, 0),
    _Call("newfstatat", 0, 1): (262, 79),
    _Call("statx", 0, 1): (332, 291),
    _Call("mkdir", None, 0): (83, 0),
    _Call("mkdirat", 0, 1): (258, 34),
    _Call("rename", None, 0): (82, 0),
    _Call("renameat", 0, 1): (264, 38),
    _Call("renameat2", 0, 1): (316, 276),
    _Call("unlink", None, 0): (87, 0),
    _Call("unlinkat", 0, 1): (263, 35),
    _Call("fsync", 0, None): (74, 82),
    _Call("flock", 0, None): (73, 32),
}
_NOT_LOCKS = frozenset(call.name for call in _CALLS if call.name != "flock")
_MACHINES = {"x86_64": (0, 317), "aarch64": (1, 277)}  # column above, number of seccomp()


def _table() -> dict[int, _Call]:
    column = _MACHINES[platform.machine()][0]
    return {numbers[column]: call for call, numbers in _CALLS.items() if numbers[column]}


class FailingStorage:
    """Runs commands whose calls on files below ``folder`` fail on demand; ``failed`` counts failed calls by name."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self._folder, self._address = str(folder), str(sockets / "seccomp")
        self._number = 0  # errno of calls; 0: they succeed
        self._only = _NOT_LOCKS
        self.failed: Counter[str] = Counter()
        self._calls = _table()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()

    @contextlib.contextmanager
    def running(self, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
        """Start the command, and kill it at the end of the block."""
        line = [sys.executable, "-m", "tests.helpers.failing_storage", self._address, *command]
        with subprocess.Popen(line, cwd=_ROOT, start_new_session=True, **options) as process:
            connection, _ = self._listener.accept()
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            connection.close()
            threading.Thread(target=self._serve, args=descriptors, daemon=True).start()
            try:
                yield process
            finally:
                process.kill()

    def fail(self, number: int, only: Collection[str] = _NOT_LOCKS) -> None:
        """Make calls fail with this errno from now on, those of these names; by default all except locks."""
        self._number, self._only = number, only

    def work(self) -> None:
        """Make calls succeed again."""
        self._number = 0

    def _serve(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while poll.poll()[0][1] & select.POLLIN:
            asked = bytearray(80)
            with contextlib.suppress(FileNotFoundError):  # the process is gone
                fcntl.ioctl(descriptor, _RECEIVE, asked)
                identity, pid, number, *arguments = struct.unpack("=QI4xi12x6Q", asked)
                error = self._answer(pid, self._calls[number], arguments) if self._number else 0
                flags = 0 if error else _CONTINUE
                fcntl.ioctl(descriptor, _SEND, struct.pack("QqiI", identity, 0, -error, flags))
        os.close(descriptor)

    def _answer(self, pid: int, call: _Call, arguments: Sequence[int]) -> int:
        """errno for this call; 0 to let it pass."""
        try:
            folder = f"/proc/{pid}/cwd"
            if call.folder is not None and ctypes.c_int(arguments[call.folder]).value != _AT_FDCWD:
                folder = f"/proc/{pid}/fd/{arguments[call.folder]}"
            path = os.readlink(folder)
            if call.path is not None:
                path = os.path.join(path, _text_at(pid, arguments[call.path]))
        except OSError:
            return 0
        if not f"{path}/".startswith(f"{self._folder}/"):
            return 0
        number = self._number if call.name in self._only else 0  # another thread may set it
        self.failed[call.name] += bool(number)
        return number


def _text_at(pid: int, address: int) -> str:
    """C string at an address in a process's memory."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(4096 - address % 4096)  # up to the end of the page, beyond it only if needed
        if b"\0" not in data:
            data += memory.read(4096)
    return os.fsdecode(data[: data.index(b"\0")])


def _install() -> int:
    """Filter this process's calls from now on; returns the descriptor for answering them."""
    steps = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    for number, call in _table().items():
        ask = [(_RETURN, 0, 0, _ASK)]
        if call.name == "newfstatat":  # of an open file: too frequent to intercept
            ask = [(_LOAD, 0, 0, _FLAGS), (_ANY_BIT, 0, 1, _AT_EMPTY_PATH), (_RETURN, 0, 0, _ALLOW), *ask]
        steps.append(struct.pack("HBBI", _EQUAL, 0, len(ask), number))
        steps += [struct.pack("HBBI", *step) for step in ask]
    steps.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    code = b"".join(steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    number = _MACHINES[platform.machine()][1]
    descriptor = libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, program)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(descriptor)


def possible() -> bool:
    """True if the kernel supports this."""
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    return platform.machine() in _MACHINES and actions.exists() and "user_notif" in actions.read_text()


def _main(address: str, *command: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        descriptor = _install()
        socket.send_fds(connection, [b"x"], [descriptor])
        os.close(descriptor)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(*sys.argv[1:])
