"""What is around a sandbox: canaries of the programs' user, which no program may reach or change.

Users are numbers that no other process has, so that a program that escapes finds nothing but canaries.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rewards.users import PYTHON, ROOT

_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")
_MARK = b"hostile"
_KERNEL_OBJECTS = ("shm", "sem", "msg")
_WORDS = ("limits", "oom_score_adj", "autogroup", "timerslack_ns", "coredump_filter")
_IOPRIO_GET = {"aarch64": 31}.get(os.uname().machine, 252)
_libc = ctypes.CDLL(None, use_errno=True)

# A process with a secret in its environment, memory and shared memory.
_CANARY = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
secret = os.environ["CANARY"].encode()
shared = libc.shmget(0, 4096, 0o1600)
ctypes.memmove(libc.shmat(shared, None, 0), secret, len(secret))
held = ctypes.create_string_buffer(secret)
print(shared, libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600), ctypes.addressof(held), flush=True)
time.sleep(3600)
"""


def free_user() -> int:
    """A user number without an account and without processes."""
    taken = {os.stat(f"/proc/{pid}").st_uid for pid in os.listdir("/proc") if pid.isdigit() and _exists(pid)}
    taken |= {account.pw_uid for account in pwd.getpwall()}
    return next(number for number in range(20000 + os.getpid() % 20000, 60000) if number not in taken)


def _exists(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}/stat")


def processes_of(user: int) -> set[int]:
    found = set()
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if pid.isdigit() and os.stat(f"/proc/{pid}").st_uid == user and _state(int(pid)) != "Z":
                found.add(int(pid))
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass
class Around:
    """Canaries for the programs of one user. ``file_secret`` is in files, ``process_secret`` in a process."""

    user: int
    top: Path
    file_secret: str
    process_secret: str
    canary: subprocess.Popen[str]
    objects: tuple[int, ...]
    listeners: dict[str, socket.socket]
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def public(self) -> Path:
        """The folder of temporary files."""
        return self.top / "public"

    def state(self, worker: int) -> dict[str, Any]:
        """Everything that must be the same after a program, with the process that runs sandboxes."""
        return {
            "canary": _attributes(self.canary.pid),
            "worker": _attributes(worker),
            "files": {str(path): _file(path) for path in sorted(self.top.rglob("*")) if path != self.public},
            "connections": [name for name, listener in self.listeners.items() if _was_reached(listener)],
            "objects of the kernel": [self._objects(kind) for kind in _KERNEL_OBJECTS],
            "left": _left(self.user),
        }

    def strangers(self, worker: int) -> set[int]:
        return processes_of(self.user) - {self.canary.pid, worker}

    def _objects(self, kind: str) -> list[str]:
        lines = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
        return [" ".join(line) for line in lines if line[1] in map(str, self.objects) or str(self.user) in line]


def _left(user: int) -> list[str]:
    """Files of a user in folders that everyone may write."""
    found = []
    for folder in _SHARED_FOLDERS:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        found.append(entry.path)
    return sorted(found)


def _attributes(pid: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = {"stopped": _state(pid) in "Tt", "zombie": _state(pid) == "Z"}
        for word in _WORDS:
            with contextlib.suppress(FileNotFoundError):
                found[word] = Path(f"/proc/{pid}/{word}").read_text()
        found |= {"priority": os.getpriority(os.PRIO_PROCESS, pid), "cores": sorted(os.sched_getaffinity(pid))}
        return found | {"policy": os.sched_getscheduler(pid), "disk": _libc.syscall(_IOPRIO_GET, 1, pid)}
    except (OSError, ProcessLookupError):
        return {"gone": True}


def _file(path: Path) -> tuple[Any, ...]:
    found = path.lstat()
    text = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
    return (oct(found.st_mode), found.st_uid, found.st_gid, found.st_size, found.st_nlink, found.st_mtime_ns, text)


def _was_reached(listener: socket.socket) -> bool:
    """Whether a hostile program has sent its mark; other tests may connect to all ports of this machine."""
    with contextlib.suppress(BlockingIOError):
        while True:
            reached = False
            if listener.type == socket.SOCK_DGRAM:
                reached = listener.recv(99).startswith(_MARK)
            else:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):
                    connection.settimeout(0.2)
                    reached = connection.recv(99).startswith(_MARK)
            if reached:
                return True
    return False


@contextlib.contextmanager
def canaries(user: int) -> Iterator[Around]:
    """Sets up canaries for a user, and removes everything of that user at the end."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp", ignore_cleanup_errors=True) as name:
        top = Path(name)
        top.chmod(0o755)
        secret, other = secrets.token_hex(16), secrets.token_hex(16)
        _make_files(top, user, secret)
        listeners = _listen(top)
        environment = {"CANARY": other, "PATH": "/usr/bin:/bin"}
        canary = subprocess.Popen(
            [PYTHON, "-I", "-S", "-c", _CANARY],
            user=user, group=user, extra_groups=[], env=environment, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        try:
            assert canary.stdout is not None
            *objects, address = map(int, canary.stdout.readline().split())
            around = Around(user, top, secret, other, canary, tuple(objects), listeners)
            around.names = {
                "CANARY": canary.pid, "ADDRESS": address, "HOME": str(top / "home"), "SHOWN": str(top / "shown"),
                "SHARED": objects[0], "SEMAPHORE": objects[1], "QUEUE": objects[2],
                "TCP": listeners["tcp"].getsockname(), "UDP": listeners["udp"].getsockname(),
                "ABSTRACT": listeners["abstract"].getsockname(), "MARK": _MARK,
                "PREFIX": sys.base_prefix, "ROOT": str(ROOT),
            }  # fmt: skip
            yield around
        finally:
            _end(canary, user)
            for path in _left(user):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            for listener in listeners.values():
                listener.close()


def _make_files(top: Path, user: int, secret: str) -> None:
    for folder in ("home", "home/.ssh", "shown", "public"):
        (top / folder).mkdir()
    for file in ("home/secret", "home/.ssh/id_ed25519", "home/.bashrc"):
        (top / file).write_text(f"{secret}\n")
    (top / "shown" / "data").write_text("shown\n")
    os.mkfifo(top / "shown" / "fifo")
    for path in (top / "home", top / "shown", *top.rglob("*")):
        os.chown(path, user, user)
    (top / "public").chmod(0o1777)
    os.chown(top / "public", 0, 0)
    (top / "home").chmod(0o700)


def _listen(top: Path) -> dict[str, socket.socket]:
    unix, udp, abstract = socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM), socket.socket(1)
    unix.bind(str(top / "shown" / "socket"))
    os.chmod(top / "shown" / "socket", 0o777)
    address = f"127.{'.'.join(str(1 + secrets.randbelow(250)) for _ in range(3))}"  # not that of other tests
    udp.bind((address, 0))
    abstract.bind(b"\0" + secrets.token_bytes(8).hex().encode())
    listeners = {"tcp": socket.create_server((address, 0)), "udp": udp, "unix": unix, "abstract": abstract}
    for name, listener in listeners.items():
        listener.setblocking(False)
        if name in ("unix", "abstract"):
            listener.listen()
    return listeners


def _end(canary: subprocess.Popen[str], user: int) -> None:
    """Ends the canary and anything else of this user, which no other process has."""
    canary.kill()
    canary.wait()
    for pid in processes_of(user):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for kind in _KERNEL_OBJECTS:
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if str(user) in fields:
                remove = {"shm": _libc.shmctl, "msg": _libc.msgctl}.get(kind)
                if remove:
                    remove(int(fields[1]), 0, None)
                else:
                    _libc.semctl(int(fields[1]), 0, 0)


def until_gone(around: Around, worker: int, seconds: float = 5.0) -> set[int]:
    """Processes of the user that are left after some time."""
    deadline = time.monotonic() + seconds
    while (left := around.strangers(worker)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
