"""Runs on this machine: one process per rank, started through submitit, watched until the last has ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from submitit import Job, LocalExecutor

from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts, env, exits, storage
from rlhpc.core.attempts import Verdict, saved_step
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.exits import ExitRecord, StartRecord, read_exits, read_starts
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import ProcessId, oom_kills
from rlhpc.core.rank import node_name
from rlhpc.core.shown import read_report, show
from rlhpc.core.storage import Patience, exists, use
from rlhpc.launch.machine import check_resources, environment, rank_environment
from rlhpc.launch.resolved import resolved
from rlhpc.launch.run_lock import locked
from rlhpc.launch.slurm.commands import private_files
from rlhpc.launch.supervise.diagnosis import diagnose_error
from rlhpc.launch.supervise.engine_losses import after_former_losses
from rlhpc.launch.supervise.hang_watch import HangWatch
from rlhpc.launch.supervise.job_ranks import JobRanks
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.supervise.side_processes import PAGE_STEPS, PageRenewal, TrackerProcess
from rlhpc.launch.worker.main import TRAINER, run_local_rank
from rlhpc.launch.worker.node_folders import release, set_caches, set_tmpdir
from rlhpc.launch.worker.nsys import nsys_environment
from rlhpc.observe.alerts.job import JobAlerts, stopping_alert
from rlhpc.observe.progress import Display, MetricsFollower

INTERRUPTED = 130
_POLL_SECONDS = 0.1
# Waits after the first failure: for more records of it; for the cause itself while only lost peers are known.
_GRACE_SECONDS, _CAUSE_SECONDS = 1.0, 5.0
_TEARDOWN_SECONDS = 5.0  # for finished ranks to tear down engines and process groups
_FOR_EVER_MINUTES = 60 * 24 * 365
# How much later than the first rank another may start before it counts as lost.
_START_SECONDS = 120.0
_END_SECONDS = 2.0
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')  # of faulthandler


@private_files()
def run_local(config: RunConfig, folder: RunFolder, *, resume: bool = False, entry: str = TRAINER) -> int:
    """Calls ``entry`` (package.module:function) on every rank (rlhpc.core.context); returns the exit code.

    With ``resume``, continues from the newest checkpoint in ``folder``. A UserError of a rank is raised here; any other
    failure is printed to stderr and gives 1, as does a stop by an alert. The other ranks are ended within about two
    seconds of the first failure. Ctrl-C lets the ranks finish their step and save, a second one ends them at once; both
    give 130.
    """
    wait = config.recovery.storage_wait_seconds
    use(Patience(wait, full_seconds=wait))
    check_resources(config)
    check_folder(folder, resume=resume)
    folder.create()
    with locked(folder), contextlib.ExitStack() as stack:
        attempt = _begin(config, folder)
        folders = stack.enter_context(_node_folders(attempt))
        stack.callback(TrackerProcess(folder, config).end)  # after the page is written, which they attach
        pages = PageRenewal(folder, PAGE_STEPS if entry == TRAINER else 0)
        stack.callback(pages.end)  # after the verdict
        oom_before = oom_kills()
        store = StoreServer.open(host="127.0.0.1")
        hangs = HangWatch.of_attempt(attempt, config, config.world_size, store.beats)
        how = LocalStart(config, attempt, entry, {**store.environment("127.0.0.1"), **folders})
        ranks = JobRanks.start(how, store, lambda message: show(f"rlhpc: {message}", file=sys.stderr))
        try:
            ended = _watch_or_stop(ranks, folder, hangs, pages)
            failed = exits.first_failure(ended.values())
            deadline = time.monotonic() + _TEARDOWN_SECONDS
            for part in ranks.parts if failed is None else ():
                part.wait_for_end(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            attempts.end(attempt, Verdict(time.time(), "stopped", "ended by Ctrl-C before the ranks had saved", "stop"))
            show(f"rlhpc: ended; resume with --resume: {folder.path}", file=sys.stderr)
            return INTERRUPTED
        finally:
            ranks.end()
            hangs.close()
            store.close()
        if failed is not None:
            cause = diagnose_error(failed).cause
            _end(config, attempt, Verdict(time.time(), cause, failed.message, "stop", failed.rank, failed.node))
            if cause in ("non_finite", "stranger"):
                show(f"rlhpc: {failed.message}", file=sys.stderr)
            else:
                _report(failed, ranks, oom=oom_kills() > oom_before)
            return 1
        if reasons := {record.message for record in ended.values() if record.kind == "stopped"}:
            return _end_stopped(config, attempt, by_alert="alert" in reasons)
        _end(config, attempt, Verdict(time.time(), "finished", "", "none"))
    if report := read_report(folder):
        show(report)
    return 0


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


def _begin(config: RunConfig, folder: RunFolder) -> AttemptFolder:
    nodes, config = (node_name(),), resolved(config, folder).in_one_job()
    attempt = attempts.begin(
        folder,
        job_id="",
        restart_count=0,
        nodes=nodes,
        world_size=config.world_size,
        saved_step=saved_step(folder),
        hang_timeout_seconds=config.recovery.hang_timeout_seconds,
        storage_wait_seconds=config.recovery.storage_wait_seconds,
    )
    save_config(folder, config)
    save_config(folder, after_former_losses(config, folder), attempt.config)
    return attempt


def _end(config: RunConfig, attempt: AttemptFolder, verdict: Verdict) -> None:
    """Records the verdict and sends the alert on it."""
    attempts.end(attempt, verdict)
    alerts = JobAlerts(attempt.run, config.observe.alerts)
    alerts.report(attempt, verdict)
    alerts.close()


def _end_stopped(config: RunConfig, attempt: AttemptFolder, *, by_alert: bool) -> int:
    """Records that the ranks saved and ended, and shows the way to resume; returns the exit code."""
    if by_alert:
        words = f"saved and ended by {stopping_alert(attempt.run)}"
        _end(config, attempt, Verdict(time.time(), "stopped", words, "stop"))
    else:
        words = "saved and ended"
        attempts.end(attempt, Verdict(time.time(), "stopped", f"{words} on request", "stop"))
    show(f"rlhpc: {words}; resume with --resume: {attempt.run.path}", file=sys.stderr)
    return 1 if by_alert else INTERRUPTED


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


def _watch_or_stop(
    ranks: JobRanks[Ranks], folder: RunFolder, hangs: HangWatch, pages: PageRenewal
) -> dict[int, ExitRecord]:
    """Watches the ranks; the first Ctrl-C asks them to save and end, and watching continues."""
    try:
        return _watch(ranks, folder, hangs, pages)
    except KeyboardInterrupt:
        show("rlhpc: finishing the step and saving; press Ctrl-C again to end at once", file=sys.stderr)
        for part in ranks.parts:
            part.ask_to_stop()
        return _watch(ranks, folder, hangs, pages)


def _watch(ranks: JobRanks[Ranks], folder: RunFolder, hangs: HangWatch, pages: PageRenewal) -> dict[int, ExitRecord]:
    """Waits until every rank is done, or one has failed and its peers had time to record it; exit records by rank."""
    follower, alerts = MetricsFollower(folder.metrics), MetricsFollower(folder.alerts)
    failed_at = None
    with Display() as display:
        while True:
            ended = ranks.poll()
            display.update(follower.read_new(), hangs.phase, alerts.read_new())
            pages.poll()
            if len(ended) == len(ranks.ranks):
                return ended
            hang = hangs.poll()
            if hang is not None:
                rank = max(hang.rank, 0)
                return {rank: ExitRecord(rank, hang.node, 0, time.time(), "error", "Hang", hang.message)}
            kinds = {record.kind for record in ended.values()} - {"done", "stopped"}
            if kinds:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > (_CAUSE_SECONDS if kinds == {"peer"} else _GRACE_SECONDS):
                    return ended
            time.sleep(_POLL_SECONDS)


def _report(failed: ExitRecord, ranks: JobRanks[Ranks], *, oom: bool) -> None:
    """Raises the rank's UserError, or prints its error and the path of its log."""
    if failed.kind == "user":
        raise UserError(failed.message)
    if failed.kind == "signal":
        cause = "; the kernel killed a process meanwhile because memory was exhausted" if oom else ""
        text = f"rank {failed.rank} on {failed.node} {failed.message}{cause}"
    else:
        text = f"rank {failed.rank} on {failed.node} failed: {failed.type}: {one_line(failed.message)[:500]}"
    contents = "output and traceback" if failed.traceback else "output"
    log = next(part for part in ranks.parts if failed.rank in part.ranks).log(failed.rank)
    show(f"rlhpc: {text}\nrlhpc: its {contents}: {log}", file=sys.stderr)


@dataclass(frozen=True)
class LocalStart:
    """Starts ranks on this machine through submitit. ``settings``: further variables of their environment."""

    config: RunConfig
    attempt: AttemptFolder
    entry: str
    settings: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.config.world_size

    def start(self, ranks: range, generation: int = 0) -> Ranks:
        """Starts a part of the ranks, or all."""
        config, world_size = self.config, self.world_size
        executor = LocalExecutor(folder=self.attempt.logs)
        executor.update_parameters(
            tasks_per_node=len(ranks), gpus_per_node=len(ranks), timeout_min=_FOR_EVER_MINUTES, stderr_to_stdout=True
        )
        visible = os.environ.get(env.CUDA_VISIBLE_DEVICES)
        settings = {**rank_environment(config), **nsys_environment(config.profile), **self.settings}
        if len(ranks) < world_size:
            settings |= {
                env.RLHPC_WORLD_SIZE: str(world_size),
                env.RLHPC_FIRST_RANK: str(ranks.start),
                env.RLHPC_FIRST_LOCAL_RANK: str(ranks.start),
                env.RLHPC_GENERATION: str(generation),
            }
        # The launcher handles Ctrl-C; the processes inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with environment(settings):
                job = executor.submit(run_local_rank, self.entry, str(self.attempt.path), ProcessId.own(), visible)
        finally:
            signal.signal(signal.SIGINT, handler)
        started = Ranks(job, self.attempt.exits, ranks, node_name())
        if len(ranks) < world_size:
            self._link_logs(started)
        return started

    def _link_logs(self, ranks: Ranks) -> None:
        """Names the logs by the run's ranks; submitit names them by its jobs and their tasks."""
        for rank in ranks.ranks:
            link = self.attempt.logs / f"rank-{rank:05d}.log"
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            link.symlink_to(ranks.log(rank).name)


class Ranks:
    """The processes of a submitit local job, seen through their start and exit records.

    submitit's controller starts one process per rank and waits for all of them; it neither notices nor ends the
    others when one dies, and it keeps exit codes to itself.
    """

    def __init__(self, job: Job, exits: Path, ranks: range, node: str) -> None:
        """``ranks``: the run's numbers of the job's tasks."""
        self._job, self._exits, self.ranks, self.node = job, exits, ranks, node
        self.gone = ""
        self._starts: dict[int, StartRecord] = {}
        self._silent: dict[int, ExitRecord] = {}

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of the ranks that ended; a rank that left none gets one of kind ``signal``."""
        if len(self._starts) < len(self.ranks):
            self._starts = self._read_starts()
        all_over = self._job.done()
        # Before the records are read: a rank writes its record, then ends.
        gone = {rank for rank, start in self._starts.items() if not start.process.is_alive()}
        exits = {rank: record for rank, record in read_exits(self._exits).items() if rank in self.ranks}
        for rank in self.ranks:
            if rank in gone or (rank not in self._starts and (all_over or self._is_late())):
                self._silent.setdefault(rank, self._silent_record(rank))
        return {**self._silent, **exits}

    def log(self, rank: int) -> Path:
        """Log of the rank."""
        return Path(self._job.task(rank - self.ranks.start).paths.stdout)

    def ask_to_stop(self) -> None:
        """Asks the ranks to finish their step, save and end."""
        for start in self._read_starts().values():
            if start.process.is_alive():
                os.kill(start.process.pid, signal.SIGUSR2)

    def wait_for_end(self, seconds: float) -> None:
        """Waits for the job to end by itself."""
        deadline = time.monotonic() + seconds
        while not self._job.done() and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self) -> None:
        """Kills every rank with its children, then submitit's controller."""
        if len(self._starts) < len(self.ranks):
            with contextlib.suppress(OSError):  # those known so far are killed anyway
                self._starts = self._read_starts(storage.BRIEF)
        for start in self._starts.values():
            start.process.kill_group()
        controller = int(self._job.job_id)
        for signum in (signal.SIGTERM, signal.SIGKILL):  # the controller passes SIGTERM on to ranks not yet started
            if self._job.done():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller, signum)
            self.wait_for_end(_END_SECONDS)

    def _read_starts(self, patience: storage.Patience | None = None) -> dict[int, StartRecord]:
        starts = read_starts(self._exits, patience)
        return {rank: start for rank, start in starts.items() if rank in self.ranks}

    def _is_late(self) -> bool:
        first = min((start.time for start in self._starts.values()), default=time.time())
        return time.time() - first > _START_SECONDS

    def _silent_record(self, rank: int) -> ExitRecord:
        start = self._starts.get(rank)
        if start is None:
            return ExitRecord(rank, self.node, 0, time.time(), "signal", message="ended before it started")
        message = _fatal_error(self.log(rank)) or "was killed, or ended without a Python error"
        return ExitRecord(rank, start.node, start.process.pid, time.time(), "signal", message=message)


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
