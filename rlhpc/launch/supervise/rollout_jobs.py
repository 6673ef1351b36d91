"""What the trainers' job does for the run's rollout jobs, whose engines join its attempts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.storage import NONE, say
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.roles import parts_of
from rlhpc.launch.slurm.commands import ask, last_line
from rlhpc.launch.slurm.queue import JobStatus, read_jobs
from rlhpc.launch.supervise.shared_store import forget_store, share_store
from rlhpc.plan.checks.run import largest_usable

_LOOK_SECONDS, _TIMES_GONE = 30.0, 2


def in_job_of(nodes: int, config: RunConfig) -> RunConfig:
    """The configuration in a job of so many nodes: with as many as the whole run needs, all ranks are its own."""
    return config.in_one_job() if nodes >= config.slurm.least_nodes else config


def usable_nodes(config: RunConfig, present: int) -> int:
    """How many of ``present`` nodes of the trainers' job layout and batches can use, beside those of rollout jobs; 0 if
    they are too few."""
    others = config.all_rollout_job_nodes
    return max(0, largest_usable(config, present + others) - others)


def world_size(config: RunConfig, nodes: int) -> int:
    """Number of the run's ranks, with those of rollout jobs, if ``nodes`` of the trainers' job are used."""
    return (nodes + config.all_rollout_job_nodes) * config.resources.ranks_per_node


@contextlib.contextmanager
def shared(attempt: AttemptFolder, config: RunConfig, address: StoreAddress) -> Iterator[None]:
    """Context in which rollout jobs find the attempt's store, if there are any."""
    if not config.all_rollout_job_nodes:
        yield
        return
    share_store(attempt, address)
    try:
        yield
    finally:
        forget_store(attempt)


class RolloutJobsWatch:
    """Notes that trainers without engines of their own wait for nothing: no rollout job runs or can ever start."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        self._needed = bool(config.all_rollout_job_nodes) and len(parts_of(config, config.world_size)) == 1
        self._run, self._looked, self._gone = run, time.monotonic(), 0

    def look(self) -> str:
        """Why there will be no engines, once; empty before. Slurm is asked now and then, and must say so twice."""
        if not self._needed or time.monotonic() - self._looked < _LOOK_SECONDS:
            return ""
        self._looked = time.monotonic()
        job, cluster = rollout_job_of(self._run)
        try:
            known = read_jobs([job], cluster) if job else {}
        except UserError:
            return ""
        live = [status for status in known.values() if status.live]
        hopeless = [status for status in live if status.queued and status.why.kind == "never"]
        self._gone = 0 if len(hopeless) < len(live) or not job else self._gone + 1
        self._needed = self._gone < _TIMES_GONE
        if self._needed:
            return ""
        return _hopeless(hopeless[0]) if hopeless else "all rollout jobs have ended"


def _hopeless(job: JobStatus) -> str:
    why = job.why
    where = why.key.replace("slurm.", "slurm.rollout_jobs.", 1)
    return f"rollout job {job.job_id} can never start, because it {why.words} ({job.reason}); {where}: {why.remedy}"


def rollout_job_of(run: RunFolder) -> tuple[str, str]:
    """Id of the run's rollout jobs, of an array if there are several, and their cluster; empty without any."""
    try:
        known = read_json(run.job, NONE)
        return str(known.get("rollout_job", "")), str(known.get("cluster", ""))
    except (OSError, ValueError, AttributeError):
        return "", ""


def cancel_all(run: RunFolder) -> None:
    """Cancels them; they would see the run's end only when they start, or look."""
    job, cluster = rollout_job_of(run)
    if not job:
        return
    try:
        answer = ask("scancel", job, cluster=cluster)
    except UserError as error:
        say(f"the rollout jobs {job} are not cancelled: {error}")
    else:
        if answer.code:
            say(f"the rollout jobs {job} are not cancelled: {last_line(answer.err)}")
