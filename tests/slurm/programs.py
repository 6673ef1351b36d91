"""Small rank programs for jobs on a test cluster: each fails in one way, and works when it was answered rightly."""

from __future__ import annotations

import errno
import os
import time

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.context import RankContext
from rlhpc.core.errors import NodeError, UserError


class OutOfMemoryError(RuntimeError):
    """By name what torch raises on a GPU."""


def work(context: RankContext) -> str | None:
    """Ten minutes' work that can be asked to stop."""
    for _ in range(6000):
        if context.stop.reason != "none":
            return context.stop.reason
        context.heartbeat.touch("work")
        time.sleep(0.1)
    return None


def long_step(context: RankContext) -> None:
    """A step that takes longer than Slurm waits after its SIGTERM."""
    context.heartbeat.touch("work")
    time.sleep(600)


def dies_when_told(context: RankContext) -> None:
    """Ranks that Slurm's SIGTERM ends at once."""
    if work(context) is not None:
        os.kill(os.getpid(), 9)


def done(context: RankContext) -> None:
    """Nothing to do."""


def note_store(context: RankContext) -> None:
    """Leave where this rank found the job's store."""
    (context.run.path / f"store-{context.info.rank}").write_text(os.environ[env.RLHPC_STORE])


def too_large(context: RankContext) -> None:
    """Rank 1 fits its memory only with small micro-batches."""
    if context.info.rank == 1 and load_config(context.attempt.config).train.tokens_per_microbatch > 5000:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def wrong_input(context: RankContext) -> None:
    raise UserError("8 is too many", where="rollout.tp", remedy="use 4")


def wrong_code(context: RankContext) -> None:
    if context.info.rank == 1:
        raise KeyError("score")
    time.sleep(600)


def bad_node(context: RankContext) -> None:
    """One machine of the cluster is at fault."""
    if os.environ[env.SLURMD_NODENAME] == "node2":
        raise NodeError("CUDA driver initialization failed", where="node node2")


def bad_node_once(context: RankContext) -> None:
    """As above, in the first attempt."""
    if context.attempt.number == 1:
        bad_node(context)


def lost_connection(context: RankContext) -> None:
    """The network fails twice."""
    if context.attempt.number < 3:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:4242")


def full_disk(context: RankContext) -> None:
    """The disk is full while the first attempt runs."""
    if context.attempt.number == 1 and context.info.rank == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(context.run.metrics))


def dies(context: RankContext) -> None:
    """Rank 1 is killed, always on the node where it starts."""
    if context.info.rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def stuck(context: RankContext) -> None:
    """Rank 1 sleeps where the first attempt began, the others wait for it."""
    context.heartbeat.touch("work")
    if context.attempt.number == 1:
        time.sleep(600)
