"""Runs on this machine: one process per rank, started through submitit, watched until the last has ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Iterator

from rlhpc.config.saved import save_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts, exits
from rlhpc.core.attempts import Verdict, saved_step
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.exits import ExitRecord
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.process import oom_kills
from rlhpc.core.rank import node_name
from rlhpc.core.shown import read_report, show
from rlhpc.core.storage import Patience, exists, use
from rlhpc.launch.machine import check_resources
from rlhpc.launch.resolved import resolved
from rlhpc.launch.roles import roles_of
from rlhpc.launch.run_lock import locked
from rlhpc.launch.slurm.commands import private_files
from rlhpc.launch.supervise.diagnosis import diagnose_error
from rlhpc.launch.supervise.engine_losses import after_former_losses
from rlhpc.launch.supervise.hang_watch import HangLimits, HangWatch
from rlhpc.launch.supervise.job_ranks import JobRanks
from rlhpc.launch.supervise.local_start import LocalStart
from rlhpc.launch.supervise.page_renewal import PAGE_STEPS, PageRenewal
from rlhpc.launch.supervise.process_watch import Ranks
from rlhpc.launch.supervise.rendezvous_server import StoreServer
from rlhpc.launch.supervise.trackers import fed_trackers
from rlhpc.launch.worker.main import TRAINER
from rlhpc.launch.worker.node_folders import release, set_caches, set_tmpdir
from rlhpc.observe.alerts.job import JobAlerts, stopping_alert
from rlhpc.observe.progress import Display, MetricsFollower

INTERRUPTED = 130
_POLL_SECONDS = 0.1
# Waits after the first failure: for more records of it; for the cause itself while only lost peers are known.
_GRACE_SECONDS, _CAUSE_SECONDS = 1.0, 5.0
_TEARDOWN_SECONDS = 5.0  # for finished ranks to tear down engines and process groups
_FOR_EVER_MINUTES = 60 * 24 * 365


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
        stack.enter_context(fed_trackers(folder, config))  # until the page is written, which they attach
        pages = PageRenewal(folder, PAGE_STEPS if entry == TRAINER else 0)
        stack.callback(pages.end)  # after the verdict
        oom_before = oom_kills()
        store = StoreServer.open(host="127.0.0.1")
        hangs = _hang_watch(config, attempt)
        hangs.listen(store.beats)
        how = LocalStart(config, attempt, entry, {**store.environment("127.0.0.1"), **folders})
        ranks = JobRanks.start(how, store, lambda message: show(f"rlhpc: {message}", file=sys.stderr))
        try:
            ended = _watch_or_stop(ranks, config, attempt, pages, hangs)
            failed = exits.first_failure(ended.values())
            if failed is None:
                _wait_for_end(ranks)
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
    """Records that the ranks saved and ended, and shows how to go on; returns the exit code."""
    reason = f"by {stopping_alert(attempt.run)}" if by_alert else "on request"
    verdict = Verdict(time.time(), "stopped", f"saved and ended {reason}", "stop")
    if by_alert:
        _end(config, attempt, verdict)
    else:
        attempts.end(attempt, verdict)
    words = f"saved and ended {reason}" if by_alert else "saved and ended"
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


def _hang_watch(config: RunConfig, attempt: AttemptFolder) -> HangWatch:
    policy = config.recovery
    return HangWatch(
        attempt.heartbeats,
        config.world_size,
        HangLimits(policy.hang_timeout_seconds, policy.start_seconds, policy.storage_wait_seconds),
        placement=roles_of(config, config.world_size),
    )


def _watch_or_stop(
    ranks: JobRanks[Ranks], config: RunConfig, attempt: AttemptFolder, pages: PageRenewal, hangs: HangWatch
) -> dict[int, ExitRecord]:
    """Watches the ranks; the first Ctrl-C asks them to save and end, and watching continues."""
    world_size = config.world_size
    try:
        return _watch(ranks, world_size, attempt.run, hangs, pages)
    except KeyboardInterrupt:
        show("rlhpc: finishing the step and saving; press Ctrl-C again to end at once", file=sys.stderr)
        for part in ranks.parts:
            part.ask_to_stop()
        return _watch(ranks, world_size, attempt.run, hangs, pages)


def _watch(
    ranks: JobRanks[Ranks], world_size: int, folder: RunFolder, hangs: HangWatch, pages: PageRenewal
) -> dict[int, ExitRecord]:
    """Waits until every rank is done, or one has failed and its peers had time to record it; exit records by rank."""
    follower, alerts = MetricsFollower(folder.metrics), MetricsFollower(folder.alerts)
    failed_at = None
    with Display() as display:
        while True:
            ended = ranks.poll()
            display.update(follower.read_new(), hangs.phase, alerts.read_new())
            pages.poll()
            if len(ended) == world_size:
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


def _wait_for_end(ranks: JobRanks[Ranks]) -> None:
    """Waits a while for ranks that are done to end by themselves."""
    deadline = time.monotonic() + _TEARDOWN_SECONDS
    for part in ranks.parts:
        part.wait_for_end(max(0.0, deadline - time.monotonic()))


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
