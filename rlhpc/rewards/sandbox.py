"""Runs untrusted Python programs so that they can affect nothing but their own result.

A program runs in its own namespaces: it sees the interpreter's files, read-only, and a folder in memory that vanishes
with it, but no other process, no network and no environment variables. Limits bound its resources. The first process
of its namespace is ours; when that one ends, the kernel kills everything that the program has started.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.rewards import kernel
from rlhpc.rewards.calls import CallDied
from rlhpc.rewards.filter import filter_program

Isolation = Literal["namespaces", "filter"]

_MIB = 1 << 20
_USER = 1000  # the program's user, inside its namespace
_NOBODY = 65534
_WORK = "/tmp"
# Mount point of the new root. Every Linux has it, and nothing shown to the program lies below it.
_ROOT = "/proc"
_SHOWN = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Limits:
    """Limits of a program. CPU ``seconds`` and ``memory_mib`` apply to each of its processes. The wall-clock limit is
    three times ``seconds``, since the machine may be busy. ``file_mib`` limits the output too."""

    seconds: float = 5.0
    memory_mib: int = 512
    processes: int = 8
    open_files: int = 64
    file_mib: int = 16
    folder_mib: int = 64


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended; ``code`` is the exit code, negative for a signal, None after its time limit."""

    code: int | None
    output: str
    errors: str
    seconds: float


@dataclass(frozen=True)
class _Pipes:
    """The guard's parent process, the pipe for its messages, and the one it waits at for its users to be mapped."""

    parent: int
    outbox: int
    wait: int


class SandboxError(RuntimeError):
    """The sandbox failed, not the program."""


class SandboxKilled(SandboxError, CallDied):
    """The sandbox's first process was killed from outside, for example because memory ran out."""


class Sandbox:
    """Runs programs one at a time, each in a new sandbox. Only for processes without threads.

    ``packages``: programs may import installed packages, not only the standard library. ``paths``: absolute paths of
    further files and folders that they may read, such as libraries of the interpreter in unusual places.
    """

    def __init__(
        self,
        limits: Limits,
        isolation: Isolation = "namespaces",
        *,
        packages: bool = False,
        paths: Sequence[str] = (),
    ) -> None:
        self._limits, self._isolated = limits, isolation == "namespaces"
        base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        self._command = [sys.executable, "-I", "-B"] if packages else [base, "-I", "-B", "-S"]
        libraries = os.environ.get(env.LD_LIBRARY_PATH, "")
        self._environment = {
            env.PATH: "/usr/bin:/bin",
            env.HOME: _WORK,
            env.TMPDIR: _WORK,
            env.LANG: "C.UTF-8",
            env.OMP_NUM_THREADS: "1",
            env.OPENBLAS_NUM_THREADS: "1",
            env.MALLOC_ARENA_MAX: "1",  # each arena takes 64 MiB of RLIMIT_AS
            **({env.LD_LIBRARY_PATH: libraries} if libraries else {}),
        }
        prefixes = [sys.base_prefix, sys.base_exec_prefix, *([sys.prefix, sys.exec_prefix] if packages else [])]
        prefixes += [os.path.realpath(prefix) for prefix in prefixes]
        shown = [*_SHOWN, *prefixes, *_interpreter_libraries(), *libraries.split(":"), *paths, *_DEVICES]
        there = [path for path in shown if os.path.isabs(path) and os.path.lexists(path)]
        self._mounts = _outermost(there) if self._isolated else []

    def check(self) -> None:
        """Raises a UserError if this machine does not allow the sandbox."""
        try:
            result = self.run("print('ready')")
        except SandboxError as error:
            raise UserError(f"this machine allows no sandbox: {error}", remedy=_remedy()) from None
        if result.output != "ready\n":
            raise UserError(
                f"Python does not start in the sandbox: exit code {result.code}, {result.errors.strip()[-300:]!r}",
                remedy="raise memory_mib, or use a Python whose files everyone may read",
            )

    def run(
        self, program: str, stdin: str = "", within: float = math.inf, *, link: tuple[int, int] | None = None
    ) -> ProgramResult:
        """Runs a program to its end, its time limit or ``within`` seconds. ``link``: descriptors that are its standard
        input and output instead of ``stdin`` and the result's output."""
        streams = [os.memfd_create(name) for name in ("in", "out", "err")]
        folder = _WORK if self._isolated else tempfile.mkdtemp(prefix="sandbox-")
        try:
            os.write(streams[0], stdin.encode())
            os.lseek(streams[0], 0, os.SEEK_SET)
            started = time.monotonic()
            given = [*(link or streams[:2]), streams[2]]
            started_as = self._start(program.encode(), given, folder)
            code = self._attend(started + min(3 * self._limits.seconds, within), *started_as)
            return ProgramResult(code, _text(streams[1]), _text(streams[2]), time.monotonic() - started)
        finally:
            for stream in streams:
                os.close(stream)
            if not self._isolated:
                shutil.rmtree(folder, ignore_errors=True)

    # ---- outside

    def _start(self, program: bytes, streams: list[int], folder: str) -> tuple[int, int, int]:
        """(process, pipe of its messages, pipe that it waits at)."""
        messages, outbox = os.pipe()
        wait, go = os.pipe()
        parent = os.getpid()
        process = os.fork()
        if process:
            os.close(outbox)
            os.close(wait)
            return process, messages, go
        try:
            os.close(messages)
            os.close(go)
            self._be_guard(_Pipes(parent, outbox, wait), program, streams, folder)
        except BaseException as error:
            _send(outbox, f"E{error}")
        finally:
            os._exit(1)

    def _attend(self, deadline: float, process: int, messages: int, go: int) -> int | None:
        """Lets the guard continue once it has its namespaces. The exit code that it sends; None after the deadline."""
        try:
            while True:
                ready, _, _ = select.select([messages], [], [], max(0.0, deadline - time.monotonic()))
                message = os.read(messages, 4096).decode() if ready else ""
                match message[:1]:
                    case "U":
                        _map_users(process)
                        os.write(go, b"x")
                    case "E":
                        raise SandboxError(message[1:].splitlines()[0])
                    case "D":
                        return os.waitstatus_to_exitcode(int(message[1:]))
                    case _ if ready:
                        raise SandboxKilled("the sandbox was killed from outside, perhaps because memory ran out")
                    case _:
                        return None
        except OSError as error:
            raise SandboxError(str(error)) from error
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(messages)
            os.close(go)

    # ---- inside: each of these is a process that ends in its function

    def _be_guard(self, pipes: _Pipes, program: bytes, streams: list[int], folder: str) -> NoReturn:
        """The worker's child; the next process ends with it."""
        outbox = pipes.outbox
        _close_all_but({0, 1, 2, outbox, pipes.wait, *streams})
        if self._isolated:
            kernel.unshare_all()
            _send(outbox, "U")
            os.read(pipes.wait, 1)
        kernel.die_with_parent()
        if os.getppid() != pipes.parent:
            os._exit(1)
        _child(outbox, lambda: self._be_first(outbox, program, streams, folder))
        os._exit(0)

    def _be_first(self, outbox: int, program: bytes, streams: list[int], folder: str) -> NoReturn:
        """First process of the new namespace, whose other processes end with it. It keeps its privileges, so that the
        program cannot affect it."""
        kernel.die_with_parent()
        os.umask(0o022)
        if self._isolated:
            self._make_root()
        Path(folder, "solution.py").write_bytes(program)
        _send(outbox, f"D{_child(outbox, lambda: self._be_program(outbox, streams, folder))}")
        os._exit(0)

    def _be_program(self, outbox: int, streams: list[int], folder: str) -> NoReturn:
        os.setsid()  # no terminal
        ours = 2  # of our processes that the kernel counts for the program's user
        if self._isolated and os.geteuid() == 0:
            ours = 0
            os.setgroups([])
            os.setresgid(_USER, _USER, _USER)
            os.setresuid(_USER, _USER, _USER)
        kernel.die_with_parent()
        kernel.forget_keys()
        kernel.gain_no_rights()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        _close_all_but({0, 1, 2, outbox})  # which is closed on exec
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o077)
        os.chdir(folder)
        self._set_limits(ours)
        call_filter = filter_program(alone=not self._isolated)
        if call_filter is not None:
            kernel.filter_calls(call_filter)
        elif not self._isolated:
            raise OSError("no system-call filter for this processor")
        os.execve(self._command[0], [*self._command, f"{folder}/solution.py"], self._environment)

    def _make_root(self) -> None:
        inner = _mount_points(self._mounts)
        with contextlib.suppress(OSError):  # /proc/sys may be read-only; a nested namespace is confined too
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        size = f"mode=0755,size={self._limits.folder_mib}m,nr_inodes=8192"
        kernel.mount("tmpfs", _ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        for path in self._mounts:
            _show(path, inner)
        os.makedirs(_ROOT + _WORK, exist_ok=True)
        os.chmod(_ROOT + _WORK, 0o1777)
        kernel.change_root(_ROOT)

    def _set_limits(self, ours: int) -> None:
        limits = self._limits
        wanted = {
            resource.RLIMIT_AS: limits.memory_mib * _MIB,
            resource.RLIMIT_DATA: limits.memory_mib * _MIB,  # replaces the worker's limit
            resource.RLIMIT_CPU: math.ceil(limits.seconds),
            resource.RLIMIT_FSIZE: limits.file_mib * _MIB,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self._isolated:  # otherwise the kernel counts all processes of the user
            wanted[resource.RLIMIT_NPROC] = limits.processes + ours
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))


def _child(outbox: int, be: Callable[[], NoReturn]) -> int:
    """Forks a process that runs ``be``, waits for it, and returns its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        be()
    except BaseException as error:
        _send(outbox, f"E{error}")
    finally:
        os._exit(1)


def _send(outbox: int, message: str) -> None:
    os.write(outbox, message.encode()[:2000] + b"\n")


def _map_users(process: int) -> None:
    """Maps users into the namespace of ``process``. Root's programs run as nobody: limits do not apply to root."""
    own = (os.geteuid(), os.getegid())
    other = min(_NOBODY, _largest_id("uid_map"), _largest_id("gid_map")) if own[0] == 0 else 0
    if other:
        maps = [f"0 {one} 1\n{_USER} {other} 1" for one in own]
    else:
        maps = [f"{_USER} {one} 1" for one in own]
        Path(f"/proc/{process}/setgroups").write_text("deny")
    for name, lines in zip(("uid_map", "gid_map"), maps, strict=True):
        Path(f"/proc/{process}/{name}").write_text(lines)


def _largest_id(name: str) -> int:
    """The largest id in this process's own namespace."""
    lines = Path(f"/proc/self/{name}").read_text().splitlines()
    return max(int(line.split()[0]) + int(line.split()[2]) - 1 for line in lines)


def _interpreter_libraries() -> list[str]:
    """Folders of the shared libraries that the interpreter has loaded, such as an installation in an unusual place. Not
    folders that hold more, such as the user's home with a preloaded library."""
    with open("/proc/self/maps") as file:
        files = {line.split(maxsplit=5)[5].strip() for line in file if "/lib" in line and ".so" in line}
    folders = {os.path.dirname(path) for path in files if not path.startswith(f"{sys.prefix}/")}
    owns = [
        os.path.join(os.path.realpath(path), "")
        for path in (os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir())
    ]
    return sorted(folder for folder in folders if not any(own.startswith(os.path.join(folder, "")) for own in owns))


def _outermost(paths: list[str]) -> list[str]:
    """The paths that are not below another of them."""
    real = list(dict.fromkeys(os.path.normpath(path) for path in paths))
    return [path for path in real if not any(path.startswith(f"{other}/") for other in real)]


def _mount_points(paths: list[str]) -> list[str]:
    """Mount points of this process at or below the paths."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if any(point.startswith(f"{path}/") for path in paths)]


def _show(path: str, inner: list[str]) -> None:
    """Binds ``path`` into the new root, read-only."""
    target = _ROOT + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        return os.symlink(os.readlink(path), target)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    kernel.mount(path, target, flags=kernel.MS_BIND | kernel.MS_REC)
    if path not in _DEVICES:
        for point in (path, *(point for point in inner if point.startswith(f"{path}/"))):
            kernel.make_read_only(_ROOT + point)


def _close_all_but(needed: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else range(256):
        if descriptor not in needed:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _text(stream: int) -> str:
    return os.pread(stream, os.fstat(stream).st_size, 0).decode(errors="replace")


def _remedy() -> str:
    own = "or, for programs that you trust, set isolation: filter in the function's arguments"
    settings = {
        "/proc/sys/user/max_user_namespaces": ("0", "set the sysctl user.max_user_namespaces above 0"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "set the sysctl kernel.unprivileged_userns_clone to 1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": ("1", "let AppArmor allow user namespaces"),
    }
    for path, (bad, remedy) in settings.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == bad:
                return f"have an administrator {remedy}, {own}"
    return f"have user namespaces allowed (in a container: a seccomp profile that permits unshare and mount), {own}"
