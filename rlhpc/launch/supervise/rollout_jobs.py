"""What the trainers' job does for the run's rollout jobs, whose engines join its attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.storage import NONE, say
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.slurm.commands import ask, last_line
from rlhpc.launch.supervise.shared_store import forget_store, share_store
from rlhpc.plan.checks.run import largest_usable


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
