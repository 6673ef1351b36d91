"""What clusters do to jobs, done on purpose: each fault happens to a running job, and hardware comes back by itself."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.attempts import Cause
from rlhpc.core.exits import read_starts
from rlhpc.core.folder import RunFolder
from tests.helpers.runs import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_disk import FaultyDisk, State
from tests.slurm.settings import NETWORK, Settings, address

_OUTAGE = 20  # seconds of a file system's failure, less than runs wait for it


@dataclass(frozen=True)
class Target:
    """A running job and its run, whose files are on ``disk``; ``chance`` chooses ranks and nodes."""

    cluster: Cluster
    job_id: int
    run: RunFolder
    chance: random.Random
    disk: FaultyDisk | None = None
    repairs: list[threading.Timer] = field(default_factory=list)

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


def hide_store(target: Target) -> str:
    """One node has an old address of the first one, and a rank dies: the ranks start again."""
    record = attempts.read_attempt(attempts.folders(target.run)[-1])
    assert record is not None
    first, node = record.nodes[0], record.nodes[-1]
    known, wrong = (target.cluster.folder / name for name in ("etc/hosts", "wrong-hosts"))
    text = known.read_text()
    assert f"{address(first)} {first}" in text
    wrong.write_text(text.replace(f"{address(first)} {first}", f"{NETWORK}.99 {first}"))
    target.cluster.run(["mount", "--bind", str(wrong), "/etc/hosts"], node=node, check=True)
    later(60, lambda: target.cluster.run(["umount", "/etc/hosts"], node=node))
    return f"{kill_rank(target)}, {node} without the store"


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
    later(12, lambda: hog.unlink(missing_ok=True))
    return ""


def restart_controller(target: Target) -> str:
    """slurmctld dies and is back after a while."""
    target.cluster.stop_controller("KILL")
    later(15, target.cluster.start_controller)
    return ""


def freeze_node(target: Target) -> str:
    """All processes of a node stop, Slurm's too, and go on when the node has long been given up."""
    node = target.node()
    target.cluster.run("kill -STOP -1", node=node)
    later(50, lambda: target.cluster.run("kill -CONT -1", node=node))
    return node


def freeze_controller(target: Target) -> str:
    """slurmctld answers nobody for a while."""
    target.cluster.signal_controller("STOP")
    later(30, lambda: target.cluster.signal_controller("CONT"))
    return ""


def suspend(target: Target) -> str:
    """An administrator suspends the job for longer than a hang takes to be one."""
    target.cluster.run(["scontrol", "suspend", str(target.job_id)], check=True)
    later(SUSPENDED, lambda: target.cluster.run(["scontrol", "resume", str(target.job_id)]))
    return ""


SUSPENDED = 150  # seconds


def cut_off(target: Target) -> str:
    """A node has no way to the one with the launcher, while Slurm reaches both."""
    record = attempts.read_attempt(attempts.folders(target.run)[-1])
    assert record is not None
    node = target.chance.choice(record.nodes[1:])
    way = f"route add blackhole {address(record.nodes[0])}/32"
    target.cluster.run(f"ip {way}", node=node, check=True)
    later(240, lambda: target.cluster.run(f"ip {way.replace('add', 'delete')}", node=node))
    return node


def submit_again(target: Target) -> str:
    """The user submits the same configuration twice more while it runs."""
    file = target.run.path.parent / "config.yaml"
    command = [sys.executable, "-m", "rlhpc.cli.main", "submit", str(file)]
    environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(file.parent / "state")}
    again = [target.cluster.run(command, env=environ) for _ in range(2)]
    assert [done.returncode for done in again] == [2, 2], again
    return ""


def read_only_node(target: Target) -> str:
    """One node can only read the run's file system, until it boots."""
    node = target.node()
    place = target.run.path
    target.cluster.run(f"mount --bind {place} {place} && mount -o remount,bind,ro {place}", node=node, check=True)
    return node


def _disk_state(state: State, seconds: float = _OUTAGE) -> Callable[[Target], str]:
    def happen(target: Target) -> str:
        disk = target.disk
        assert disk is not None
        disk.set(state)
        later(seconds, lambda: disk.set(State()))
        return ""

    return happen


@dataclass(frozen=True)
class Fault:
    """``happen`` to a running job; it returns where. ``names``: causes of verdicts that name it, of which an attempt
    must end with one; without any, no attempt may end by it. ``may_pass``: runs may survive it without a new start.
    ``disk``: the run is on a FaultyDisk. ``settings`` and ``environ``: the cluster's, and those of the submission."""

    happen: Callable[[Target], str]
    names: frozenset[Cause] = frozenset()
    may_pass: bool = False
    disk: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    def cluster_settings(self, nodes: int) -> Settings:
        """Of the cluster that it happens on."""
        return Settings(nodes=nodes, **self.settings)  # type: ignore[arg-type]


def _fault(happen: Callable[[Target], str], *names: Cause, **options: object) -> Fault:
    return Fault(happen, frozenset(names), **options)  # type: ignore[arg-type]


_OF_A_NODE: tuple[Cause, ...] = ("bad_node", "requeued", "network", "allocation_lost")
FAULTS: dict[str, Fault] = {
    "kill_rank": _fault(kill_rank, "crash"),
    "crash_node": _fault(crash_node, *_OF_A_NODE),
    "unplug": _fault(unplug, *_OF_A_NODE),
    "kill_slurmd": _fault(kill_slurmd, *_OF_A_NODE, may_pass=True),
    "preempt": _fault(preempt, "preempted", "requeued"),
    "requeue": _fault(requeue, "requeued"),
    "shorten_time": _fault(shorten_time, "time_limit", may_pass=True),
    "fill_disk": _fault(fill_disk, "disk_full"),
    "restart_controller": _fault(restart_controller),
    "freeze_node": _fault(freeze_node, *_OF_A_NODE),
    "freeze_controller": _fault(freeze_controller),
    "suspend": _fault(suspend),
    "cut_off": _fault(cut_off, *_OF_A_NODE, "hang"),
    "unreachable_store": _fault(hide_store, "bad_node"),
    "submit_again": _fault(submit_again),
    "read_only_node": _fault(read_only_node, "storage", "bad_node", may_pass=True),
    "eio": _fault(_disk_state(State(errno.EIO)), "storage", may_pass=True, disk=True),
    "estale": _fault(_disk_state(State(errno.ESTALE)), "storage", may_pass=True, disk=True),
    "erofs": _fault(_disk_state(State(errno.EROFS, "writes")), "storage", may_pass=True, disk=True),
    "fsync": _fault(_disk_state(State(errno.EIO, "syncs")), "storage", may_pass=True, disk=True),
    "slow_disk": _fault(_disk_state(State(delay=0.1), 60), disk=True),
    "long_names": _fault(
        kill_rank, "crash", settings={"host_name": "{node}.rack-7.a-long-name-of-a-cluster.example.org"}
    ),
    "export_none": _fault(kill_rank, "crash", environ={"SBATCH_EXPORT": "NONE"}),
    "skewed_clocks": _fault(kill_rank, "crash", settings={"skewed": ("node2", 7200)}),
}


def _on_a_node(target: Target, hurt: Callable[[str], object], seconds: float, fix: Callable[[str], object]) -> str:
    node = target.node()
    hurt(node)
    later(seconds, lambda: fix(node))
    return node


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    def act() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the cluster may be gone with its run
            action()

    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


def small_disk(folder: Path, mebibytes: int) -> None:
    """A file system of its own at ``folder``; clusters brought up later see it. Root only."""
    folder.mkdir(parents=True, exist_ok=True)
    assert os.system(f"mount -t tmpfs -o size={mebibytes}m tmpfs {folder}") == 0
