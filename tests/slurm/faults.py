"""What clusters do to jobs, done on purpose: each fault happens to a running job, and hardware comes back by itself."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from tests.slurm.cluster import Cluster


@dataclass(frozen=True)
class Target:
    """A running job and its run; ``chance`` chooses ranks and nodes."""

    cluster: Cluster
    job_id: int
    run: RunFolder
    chance: random.Random

    def node(self) -> str:
        """One of the nodes that the ranks run on, any of them."""
        record = attempts.read_attempt(attempts.folders(self.run)[-1])
        assert record is not None
        return self.chance.choice(record.nodes)


def kill_rank(target: Target) -> str:
    """SIGKILL to one rank."""
    starts = read_starts(attempts.folders(target.run)[-1].exits)
    rank = target.chance.choice(sorted(starts))
    start = starts[rank]
    target.cluster.run(["kill", "-KILL", str(start.process.pid)], node=start.node)
    return f"rank {rank} on {start.node}"


def crash_node(target: Target) -> str:
    """Power loss; the node is back after a while."""
    return _on_a_node(target, target.cluster.crash, 20, target.cluster.boot)


def unplug(target: Target) -> str:
    """The cable is pulled, and put back when Slurm has long given the node up: the orphans live on meanwhile."""
    return _on_a_node(target, target.cluster.unplug, 50, target.cluster.plug)


def kill_slurmd(target: Target) -> str:
    """Only the daemon dies; the ranks of the node live on."""
    return _on_a_node(target, target.cluster.kill_slurmd, 40, target.cluster.start_slurmd)


def preempt(target: Target) -> str:
    """An urgent job takes one of the nodes."""
    node = target.node()
    target.cluster.submit("--partition=urgent", "--exclusive", f"--nodelist={node}", script="sleep 5", cwd="/tmp")
    return node


def requeue(target: Target) -> str:
    """`scontrol requeue`, by an administrator."""
    target.cluster.run(["scontrol", "requeue", str(target.job_id)], check=True)
    return ""


def shorten_time(target: Target) -> str:
    """The job's time is nearly over. Requeued, it has as little again, and needs several times."""
    target.cluster.run(["scontrol", "update", f"JobId={target.job_id}", "EndTime=now+75"], check=True)
    return ""


def fill_disk(target: Target) -> str:
    """Somebody fills the file system of the run, and removes it a while later."""
    hog = target.run.path.parent / "hog"
    with open(hog, "wb") as file:
        try:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        except OSError:
            pass
    _later(12, lambda: hog.unlink(missing_ok=True))
    return ""


def restart_controller(target: Target) -> str:
    """slurmctld dies and is back after a while."""
    target.cluster.stop_controller("KILL")
    _later(15, target.cluster.start_controller)
    return ""


Fault = Callable[[Target], str]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_rank,
        crash_node,
        unplug,
        kill_slurmd,
        preempt,
        requeue,
        shorten_time,
        fill_disk,
        restart_controller,
    )
}


def _on_a_node(target: Target, hurt: Callable[[str], object], seconds: float, fix: Callable[[str], object]) -> str:
    node = target.node()
    hurt(node)
    _later(seconds, lambda: fix(node))
    return node


def _later(seconds: float, action: Callable[[], object]) -> None:
    def act() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the cluster may be gone with its run
            action()

    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def small_disk(folder: Path, mebibytes: int) -> None:
    """A file system of its own at ``folder``; clusters brought up later see it. Root only."""
    folder.mkdir(parents=True, exist_ok=True)
    assert os.system(f"mount -t tmpfs -o size={mebibytes}m tmpfs {folder}") == 0
