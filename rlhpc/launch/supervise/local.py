"""Runs on this machine: its ranks are children of this process, in the terminal of `rlhpc run`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts, env
from rlhpc.core.attempts import Attempt, Verdict
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.exits import ExitRecord, read_exit, read_exits, read_start
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import ProcessId, oom_kills
from rlhpc.core.rank import node_name
from rlhpc.core.shown import read_report, show
from rlhpc.core.storage import exists
from rlhpc.launch.machine import check_resources, rank_environment
from rlhpc.launch.resolved import resolved
from rlhpc.launch.run_lock import locked
from rlhpc.launch.slurm.commands import private_files
from rlhpc.launch.supervise.allocation import Allocation, Start
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.supervisor import Supervisor
from rlhpc.launch.worker.main import TRAINER
from rlhpc.launch.worker.node_folders import release, set_caches, set_tmpdir
from rlhpc.launch.worker.nsys import nsys_environment
from rlhpc.observe.alerts.job import stopping_alert
from rlhpc.observe.progress import Display, RunOutput

INTERRUPTED = 130
_HOST = "127.0.0.1"
_TEARDOWN_SECONDS = 5.0  # for finished ranks to tear down engines and process groups
_END_SECONDS = 10.0
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')  # of faulthandler


@private_files()
def run_local(config: RunConfig, folder: RunFolder, *, resume: bool = False, entry: str = TRAINER) -> int:
    """Calls ``entry`` (package.module:function) on every rank (rlhpc.core.context); returns the exit code.

    With ``resume``, continues from the newest checkpoint in ``folder``. A UserError of a rank is raised here; any other
    failure that ends the run is printed to stderr and gives 1, as does a stop by an alert. Ctrl-C lets the ranks finish
    their step and save, a second one, or one between two attempts, ends the run at once; all give 130.
    """
    check_resources(config)
    check_folder(folder, resume=resume)
    folder.create()
    with locked(folder):
        write_config(config, folder)
        return Supervisor(folder, ThisMachine(folder, entry)).run()


def write_config(config: RunConfig, folder: RunFolder) -> None:
    """Writes the configuration that the run's attempts read."""
    save_config(folder, resolved(config, folder).in_one_job())


def check_folder(folder: RunFolder, *, resume: bool) -> None:
    """Raises UserError for a new run in a folder that contains one, or for ``resume`` in one that does not."""
    if folder.holds_run() and not resume:
        raise UserError(
            f"{str(folder.path)!r} already contains a run",
            where="run_dir",
            remedy="resume it with --resume, or choose another folder with --run-dir",
        )
    folder.check_own()
    if resume and not exists(folder.config):
        raise UserError(f"{str(folder.path)!r} contains no run", where="run_dir", remedy="start it without --resume")


class ThisMachine(Allocation):
    """This machine as a run's only node, with progress and errors in the terminal. ``entry``: the ranks' program."""

    def __init__(self, run: RunFolder, entry: str) -> None:
        self.run, self.nodes, self._entry = run, (node_name(),), entry
        self._has_stepped = False
        self._asked, self._told, self._at_once = False, False, False

    @property
    def is_ending(self) -> bool:
        return self._asked

    @property
    def may_retry(self) -> bool:
        """False before the first step of the attempt: nobody waits for a typo."""
        return self._has_stepped

    @contextlib.contextmanager
    def guarded(self, config: RunConfig) -> Iterator[None]:
        handler = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    @contextlib.contextmanager
    def starting(self, folder: AttemptFolder, config: RunConfig, attempt: Attempt) -> Iterator[Start]:
        self._has_stepped = False
        self._output = RunOutput(self.run)
        settings = {**rank_environment(config), **nsys_environment(config.profile)}
        store = contextlib.closing(StoreServer.open(host=_HOST))
        with store as server, _node_folders(folder) as folders, Display() as self._display:
            settings |= {**server.environment(_HOST), **folders}
            yield ChildStart(config, folder, self._entry, settings, lambda: self._asked), server

    def look(self, phase: str) -> None:
        new, alerts = self._output.read()
        self._has_stepped = self._has_stepped or any(step["step"] > 0 for step in new)
        self._display.update(new, phase, alerts)
        if self._asked and not self._told:
            self._told = True
            show("rlhpc: finishing the step and saving; press Ctrl-C again to end at once", file=sys.stderr)

    def no_requeue(self) -> str:
        return "this machine is the run's only node; continue with --resume"

    def log(self, text: str, *, routine: bool = False) -> None:
        if not routine:
            show(f"rlhpc: {text}", file=sys.stderr)

    def end(self, verdict: Verdict) -> int:
        if verdict.cause == "finished":
            if report := read_report(self.run):
                show(report)
            return 0
        if verdict.cause == "stopped":
            by_alert = verdict.action == "stop" and not self._at_once
            words = f"saved and ended by {stopping_alert(self.run)}" if by_alert else "saved and ended"
            self.log(f"{'ended' if self._at_once else words}; resume with --resume: {self.run.path}")
            return 1 if by_alert else INTERRUPTED
        self._report(verdict, attempts.folders(self.run)[-1])
        return 1

    def _interrupt(self, signum: int, frame: object) -> None:
        """Takes Ctrl-C."""
        if self._asked or not self.is_watched:
            self._at_once = True
            raise KeyboardInterrupt
        self._asked = True

    def _report(self, verdict: Verdict, attempt: AttemptFolder) -> None:
        """Raises the rank's UserError, or prints its error and the path of its log."""
        rank, message = verdict.rank, one_line(verdict.message)[:500]
        record = read_exit(attempt.exits, rank) if rank >= 0 else None
        if record.kind == "user" if record is not None else verdict.cause == "user":
            raise UserError(verdict.message)
        if rank < 0 or verdict.cause in ("non_finite", "stranger"):
            self.log(verdict.message)
            return
        if verdict.cause == "hang":
            message = f"failed: Hang: {message}"
        elif record is not None:
            message = f"failed: {message}"
        contents = "output and traceback" if record is not None and record.traceback else "output"
        self.log(f"rank {rank} on {verdict.node} {message}\nrlhpc: its {contents}: {log_file(attempt, rank)}")


@contextlib.contextmanager
def _node_folders(attempt: AttemptFolder) -> Iterator[dict[str, str]]:
    """Variables of the private folders for the ranks' temporary files and caches, which a resumed run finds again."""
    environ = dict(os.environ)
    run = hashlib.sha256(os.fsencode(attempt.run.path.absolute())).hexdigest()[:8]
    caches = set_tmpdir(environ, f"run-{run}", attempt.number, log=True)
    set_caches(environ, caches, log=True)
    try:
        yield {name: value for name, value in environ.items() if os.environ.get(name) != value}
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(f"{caches}/inductor")  # torch makes it in any case; only an empty one
        release()


@dataclass(frozen=True)
class ChildStart:
    """Starts ranks as children. ``settings``: variables of their environment; ``is_asked``: true once they are to save
    and end."""

    config: RunConfig
    attempt: AttemptFolder
    entry: str
    settings: Mapping[str, str]
    is_asked: Callable[[], bool]

    @property
    def world_size(self) -> int:
        return self.config.world_size

    def start(self, ranks: range, generation: int = 0) -> ChildRanks:
        """Starts a part of the ranks, or all."""
        return ChildRanks(self, ranks, {rank: self._child(rank, generation) for rank in ranks})

    def _child(self, rank: int, generation: int) -> subprocess.Popen[bytes]:
        """A rank in a session of its own: Ctrl-C reaches only this process, and its children can be ended with it."""
        launcher = ProcessId.own()
        environ = {
            **os.environ,
            **self.settings,
            env.RLHPC_LAUNCHER: f"{launcher.pid} {launcher.start}",
            env.RLHPC_ROLE: "",
            env.RLHPC_GENERATION: str(generation),
            env.RANK: str(rank),
            env.LOCAL_RANK: str(rank),
            env.WORLD_SIZE: str(self.world_size),
        }
        command = [sys.executable, "-u", "-m", "rlhpc.launch.worker.main", str(self.attempt.path), self.entry]
        with open(log_file(self.attempt, rank), "ab") as log:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


@dataclass
class ChildRanks:
    """Ranks on this machine, seen through their exit codes and records."""

    how: ChildStart
    ranks: range
    children: dict[int, subprocess.Popen[bytes]]
    node: str = field(default_factory=node_name)
    gone: str = ""
    output: str = ""
    exit_code: int = 0
    _oom_kills: int = field(default_factory=oom_kills)
    _asked: set[int] = field(default_factory=set)
    _done_at: dict[int, float] = field(default_factory=dict)
    _deaths: dict[int, ExitRecord] = field(default_factory=dict)

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of ranks that have ended or failed: see ``JobPart``."""
        if self.how.is_asked():
            self._ask_to_stop()
        # Before the records are read: a rank writes its record, then ends.
        codes = {rank: child.poll() for rank, child in self.children.items()}
        found = {rank: record for rank, record in read_exits(self.how.attempt.exits).items() if rank in self.ranks}
        for rank, code in codes.items():
            if code is None and rank in found and found[rank].kind in ("done", "stopped"):
                if time.monotonic() - self._done_at.setdefault(rank, time.monotonic()) < _TEARDOWN_SECONDS:
                    del found[rank]
            elif code is not None and rank not in found:
                if rank not in self._deaths:
                    self._deaths[rank] = self._death(rank, code)
                found[rank] = self._deaths[rank]
        return found

    def unrecorded(self) -> dict[int, ExitRecord]:
        now, why = time.time(), "ended by `rlhpc run`"
        others = {rank: ExitRecord(rank, self.node, 0, now, "peer", message=why) for rank in self.ranks}
        return {**others, **self._deaths}

    def end(self) -> None:
        """Kills every rank with its children."""
        for rank, child in self.children.items():
            start = read_start(self.how.attempt.exits, rank)  # below nsys, it leads another session
            if start is not None:
                start.process.kill_group()
            if (process := ProcessId.of(child.pid)) is not None:
                process.kill_group()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)

    def _ask_to_stop(self) -> None:
        """Asks ranks that have begun, once each, to finish their step, save and end."""
        for rank in {*self.ranks} - self._asked:
            start = read_start(self.how.attempt.exits, rank)
            if start is not None:
                self._asked.add(rank)
                if start.process.is_alive():
                    os.kill(start.process.pid, signal.SIGUSR2)

    def _death(self, rank: int, code: int) -> ExitRecord:
        """Record of a rank that left none. In its message the diagnosis finds the exit code, and lack of memory."""
        message = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            message += " when the kernel counted an oom_kill"
        message = _fatal_error(log_file(self.how.attempt, rank)) or message
        return ExitRecord(rank, self.node, self.children[rank].pid, time.time(), "signal", message=message)


def log_file(attempt: AttemptFolder, rank: int) -> Path:
    """Output of a rank."""
    return attempt.logs / f"rank-{rank:05d}.log"


def _fatal_error(log: Path) -> str:
    """Fatal error that faulthandler wrote when the interpreter crashed, such as a segmentation fault, and where; or
    empty."""
    lines = []
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if not fatal:
        return ""
    error, *stacks = lines[fatal[-1] :]
    own = next((number for number, line in enumerate(stacks) if line.startswith("Current thread ")), len(stacks))
    frame = _FRAME.fullmatch(stacks[own + 1]) if own + 1 < len(stacks) else None
    where = f" in {frame['function']} ({frame['file']}, line {frame['line']})" if frame else ""
    return f"crashed: {error.removeprefix(_FATAL)}{where}"
