"""Runs untrusted Python programs so that they can affect nothing but their own result.

A program runs in its own namespaces: it sees the interpreter's files, read-only, and a folder in memory that vanishes
with it, but no other process, no network and no environment variables. Limits bound its resources. Each process of a
sandbox ends with the one that started it. The first process of its namespace is ours; when that one ends, the kernel
kills everything that the program has started.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.rewards import kernel
from rlhpc.rewards.calls import CallDied
from rlhpc.rewards.filter import filter_program
from rlhpc.rewards.folder import INSIDE, Meter, become, give_up_rights, map_users, private_folder, program_user, sweep

# Mount point of the new root. Every Linux has it, and nothing shown to the program lies below it.
ROOT = "/proc"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

Isolation = Literal["namespaces", "filter"]
_MIB = 1 << 20
_WORK = "/tmp"
_MOST_FILES = 8192  # of a program's folder, with its subfolders
_SIGNALS = 64  # queued signals and timers: the kernel counts those of the user
_LOOK_SECONDS = 0.02  # between two measurements of a program without namespaces
_END_SECONDS = 10.0  # in which a sandbox ends after its program
# Counts of the user that a program could use up outside its namespaces.
_NONE_INSIDE = ("user_namespaces", "inotify_instances", "inotify_watches", "fanotify_groups", "fanotify_marks")


def shown_paths(prefixes: Sequence[str], libraries: str, paths: Sequence[str]) -> list[str]:
    """Absolute paths of the interpreter's files, devices and ``paths``, as far as they exist."""
    every = [*_SYSTEM, *prefixes, *interpreter_libraries(), *libraries.split(":"), *paths, *_DEVICES]
    return _outermost([path for path in every if os.path.isabs(path) and os.path.lexists(path)])


def show(paths: Sequence[str], own: Sequence[str], inner: list[str]) -> None:
    """Binds ``paths``, with the mount points ``inner``, into the new root, read-only. Hides sockets and FIFOs below
    ``own``, the user's further paths: a read-only mount does not prevent their use."""
    for path in paths:
        _show(path, inner)
    for path in own:
        for special in _sockets_and_fifos(path):
            kernel.mount("/dev/null", ROOT + special, flags=kernel.MS_BIND)


def interpreter_libraries() -> list[str]:
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


def mount_points(paths: Sequence[str]) -> list[str]:
    """Mount points of this process at or below the paths."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if any(point.startswith(f"{path}/") for path in paths)]


def _show(path: str, inner: list[str]) -> None:
    """Binds ``path`` into the new root, read-only."""
    target = ROOT + path
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
            kernel.make_read_only(ROOT + point)


def _sockets_and_fifos(path: str) -> list[str]:
    """Below a path, or itself. Not in folders that this process may not read: its program may not read them either."""
    found = [path] if os.path.lexists(path) and _is_special(os.lstat(path).st_mode) else []
    waiting = [path]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and _is_special(
                    entry.stat(follow_symlinks=False).st_mode
                ):
                    found.append(entry.path)
    return found


def _is_special(mode: int) -> bool:
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def fork(outbox: int, be: Callable[[int], NoReturn]) -> int:
    """Forks a process that runs ``be`` with its lifeline: a pipe that ends with this process."""
    lifeline, held = os.pipe()
    child = os.fork()
    if child:
        os.close(lifeline)
        return child
    try:
        os.close(held)
        be(lifeline)
    except BaseException as error:
        send(outbox, f"E{error}")
    finally:
        os._exit(1)


def end_with_parent(lifeline: int) -> None:
    """Makes this process end with its parent, also if that one has already ended. Its id would not show that: the
    parent of a namespace's first process is outside."""
    kernel.die_with_parent()
    if readable(lifeline, time.monotonic()):
        os._exit(1)


def readable(pipe: int, deadline: float, stop: int | None = None) -> bool:
    """True if a pipe has a message, or has ended, before the deadline and before ``stop``, another pipe, has ended."""
    waiting = [pipe] if stop is None else [pipe, stop]
    return pipe in select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]


def threads(process: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


def send(outbox: int, message: str) -> None:
    os.write(outbox, message.encode()[:2000] + b"\n")


def close_all_but(needed: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else range(256):
        if descriptor not in needed:
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
    """End of a program; ``code`` is the exit code, negative for a signal, None after its time limit."""

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


@dataclass(frozen=True)
class _Task:
    """A program, its standard streams and folder, and the time of ``time.monotonic`` at which it is killed.

    ``user``: without namespaces the program's user, if it is not this process's.
    """

    program: bytes
    streams: tuple[int, ...]
    folder: str
    user: int | None
    deadline: float


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
            env.LANG: "C.UTF-8",
            env.OMP_NUM_THREADS: "1",
            env.OPENBLAS_NUM_THREADS: "1",
            env.MALLOC_ARENA_MAX: "1",  # each arena takes 64 MiB of RLIMIT_AS
            **({env.LD_LIBRARY_PATH: libraries} if libraries else {}),
        }
        prefixes = [sys.base_prefix, sys.base_exec_prefix, *([sys.prefix, sys.exec_prefix] if packages else [])]
        prefixes += [os.path.realpath(prefix) for prefix in prefixes]
        self._mounts = shown_paths(prefixes, libraries, paths) if self._isolated else []
        self._own = list(paths)
        if not self._isolated:
            sweep()

    def check(self) -> None:
        """Raises a UserError if this machine does not allow the sandbox."""
        try:
            result = self.run("print('ready')")
        except SandboxError as error:
            raise UserError(
                f"this machine allows no sandbox: {error}", remedy=_remedy(isolated=self._isolated)
            ) from None
        if result.output != "ready\n":
            raise UserError(
                f"Python does not start in the sandbox: exit code {result.code}, {result.errors.strip()[-300:]!r}",
                remedy="raise memory_mib, or use a Python whose files everyone may read",
            )

    def run(
        self,
        program: str,
        stdin: str = "",
        within: float = math.inf,
        *,
        link: tuple[int, int] | None = None,
        stop: int | None = None,
    ) -> ProgramResult:
        """Runs a program to its end, its time limit or ``within`` seconds. ``link``: descriptors that are its standard
        input and output instead of ``stdin`` and the result's output. ``stop``: a pipe whose end ends it."""
        streams = tuple(os.memfd_create(name) for name in ("in", "out", "err"))
        try:
            os.write(streams[0], stdin.encode())
            os.lseek(streams[0], 0, os.SEEK_SET)
            with self._folder() as (folder, user):
                started = time.monotonic()
                deadline = started + min(3 * self._limits.seconds, within)
                task = _Task(program.encode(), (*(link or streams[:2]), streams[2]), folder, user, deadline)
                code = self._attend(deadline + _END_SECONDS, stop, *self._start(task))
                return ProgramResult(code, _text(streams[1]), _text(streams[2]), time.monotonic() - started)
        finally:
            for stream in streams:
                os.close(stream)

    # ---- outside

    @contextlib.contextmanager
    def _folder(self) -> Iterator[tuple[str, int | None]]:
        """The program's folder; without namespaces also its user, if it is not this process's."""
        if self._isolated:
            yield _WORK, None
            return
        try:
            user = program_user()
        except OSError as error:
            raise SandboxError(str(error)) from error
        with private_folder(user) as folder:
            yield folder, user

    def _start(self, task: _Task) -> tuple[int, int, int]:
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
            self._be_guard(_Pipes(parent, outbox, wait), task)
        except BaseException as error:
            send(outbox, f"E{error}")
        finally:
            os._exit(1)

    def _attend(self, deadline: float, stop: int | None, process: int, messages: int, go: int) -> int | None:
        """Lets the guard continue once it has its namespaces. The exit code that it sends; None if time ran out, or
        after ``stop``."""
        ends = False
        try:
            while True:
                ready = readable(messages, deadline, stop)
                message = os.read(messages, 4096).decode() if ready else ""
                match message[:1]:
                    case "U":
                        map_users(process)
                        os.write(go, b"x")
                    case "E":
                        raise SandboxError(message[1:].splitlines()[0])
                    case "D":
                        ends = True
                        return os.waitstatus_to_exitcode(int(message[1:]))
                    case "T":
                        ends = True
                        return None
                    case _ if ready:
                        raise SandboxKilled("the sandbox was killed from outside, perhaps because memory ran out")
                    case _:
                        return None
        except OSError as error:
            raise SandboxError(str(error)) from error
        finally:
            # The pipe ends with the last process of the sandbox.
            if not (ends and readable(messages, time.monotonic() + _END_SECONDS)):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(messages)
            os.close(go)

    # ---- inside: each of these is a process that ends in its function

    def _be_guard(self, pipes: _Pipes, task: _Task) -> NoReturn:
        """The worker's child; the next process ends with it, at the latest when its alarm rings."""
        outbox = pipes.outbox
        close_all_but({0, 1, 2, outbox, pipes.wait, *task.streams})
        if self._isolated:
            kernel.unshare_all()
            send(outbox, "U")
            os.read(pipes.wait, 1)
        kernel.die_with_parent()
        if os.getppid() != pipes.parent:
            os._exit(1)
        for signum in (signal.SIGALRM, signal.SIGCHLD):  # the latter ignored, it would take the wait status
            signal.signal(signum, signal.SIG_DFL)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):  # a program may send what the first process of a namespace handles
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, max(0.0, task.deadline - time.monotonic()) + 3 * _END_SECONDS)
        os.waitpid(fork(outbox, lambda lifeline: self._be_first(outbox, task, lifeline)), 0)
        os._exit(0)

    def _be_first(self, outbox: int, task: _Task, lifeline: int) -> NoReturn:
        """First process of the new namespace, whose other processes end with it. It keeps its privileges, so that the
        program cannot affect it."""
        end_with_parent(lifeline)
        os.umask(0o022)
        if self._isolated:
            self._make_root()
        Path(task.folder, "solution.py").write_bytes(task.program)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        program = fork(outbox, lambda lifeline: self._be_program(outbox, task, lifeline))
        try:
            message = self._watch(program, task)
        except BaseException:  # of a program's making; it counts as killed and does not end the run
            os._exit(1)
        send(outbox, message)
        os._exit(0)

    def _watch(self, program: int, task: _Task) -> str:
        """Waits for the program's end, which it brings about where no namespace bounds it; the message about it."""
        limits = self._limits
        meter = Meter(task.folder, program, limits.folder_mib, _MOST_FILES)
        while True:
            ended, status = os.waitpid(program, os.WNOHANG)
            if ended:
                return f"D{status}"
            left = task.deadline - time.monotonic()
            if left <= 0:
                os.kill(program, signal.SIGKILL)
                os.waitpid(program, 0)
                return "T"
            if not self._isolated:
                left = min(left, _LOOK_SECONDS)
                if threads(program) > limits.processes or meter.exceeds(limits.file_mib):
                    os.kill(program, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, left)

    def _be_program(self, outbox: int, task: _Task, lifeline: int) -> NoReturn:
        os.setsid()  # no terminal
        ours = 2  # of our processes that the kernel counts for the program's user
        if not self._isolated:
            give_up_rights(task.user)
        elif os.geteuid() == 0:
            ours = 0
            become(INSIDE)
        end_with_parent(lifeline)
        kernel.forget_keys()
        kernel.gain_no_rights()
        if not self._isolated:
            kernel.enter_domain()
        for target, stream in enumerate(task.streams):
            os.dup2(stream, target)
        close_all_but({0, 1, 2, outbox})  # which is closed on exec
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o077)
        os.chdir(task.folder)
        self._set_limits(ours)
        call_filter = filter_program(alone=not self._isolated)
        if call_filter is not None:
            kernel.filter_calls(call_filter)
        elif not self._isolated:
            raise OSError("no system-call filter for this processor")
        environment = {**self._environment, env.HOME: task.folder, env.TMPDIR: task.folder}
        os.execve(self._command[0], [*self._command, f"{task.folder}/solution.py"], environment)

    def _make_root(self) -> None:
        inner = mount_points(self._mounts)
        for count in _NONE_INSIDE:
            with contextlib.suppress(OSError):  # /proc/sys may be read-only; a nested namespace is confined too
                Path(f"/proc/sys/user/max_{count}").write_text("0")
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        size = f"mode=0755,size={self._limits.folder_mib}m,nr_inodes={_MOST_FILES}"
        kernel.mount("tmpfs", ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        show(self._mounts, self._own, inner)
        os.makedirs(ROOT + _WORK, exist_ok=True)
        os.chmod(ROOT + _WORK, 0o1777)
        kernel.change_root(ROOT)

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
            resource.RLIMIT_SIGPENDING: _SIGNALS,
            resource.RLIMIT_RTPRIO: 0,
            resource.RLIMIT_NICE: 0,
        }
        if self._isolated:  # otherwise the kernel counts all processes of the user
            wanted[resource.RLIMIT_NPROC] = limits.processes + ours
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))


def _text(stream: int) -> str:
    return os.pread(stream, os.fstat(stream).st_size, 0).decode(errors="replace")


def _remedy(*, isolated: bool) -> str:
    if not isolated:
        return "run as a user other than root, or use isolation: namespaces"
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
