"""Reasons of Slurm's queue in plain words, and whether the job can ever start as requested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["waits", "limit", "held", "never"]


@dataclass(frozen=True)
class Reason:
    """One queue reason. ``kind``: ``waits`` for its turn; ``limit``: for a limit that jobs share, forever if this job
    alone exceeds it; ``held`` until released; ``never`` starts as requested, unless ``key`` of the config changes."""

    code: str
    kind: Kind
    words: str
    key: str = ""
    remedy: str = ""


# Prefix of the code (the longest match counts), kind, words, key, remedy.
_TABLE: tuple[tuple[str, Kind, str, str, str], ...] = (
    ("None", "waits", "waits for the scheduler to look at it", "", ""),
    ("Priority", "waits", "waits behind jobs of higher priority", "", ""),
    ("Resources", "waits", "is next and waits for free nodes", "", ""),
    ("BeginTime", "waits", "waits for its earliest start time, as after a requeue", "", ""),
    ("Cleaning", "waits", "waits until its previous attempt has been cleaned up", "", ""),
    ("Prolog", "waits", "is being set up on its nodes", "", ""),
    ("JobArrayTaskLimit", "waits", "waits for other jobs of its array", "", ""),
    ("Licenses", "waits", "waits for a license", "", ""),
    ("Reservation", "waits", "waits for the beginning of its reservation", "", ""),
    ("ReqNodeNotAvail", "waits", "waits for nodes that are down, drained or reserved", "", ""),
    ("Nodes required for job are DOWN", "waits", "waits for nodes that are down, drained or reserved", "", ""),
    ("NodeDown", "waits", "waits for a node that is down", "", ""),
    ("PartitionDown", "waits", "waits: its partition accepts no jobs now", "slurm.partition", "choose another"),
    ("PartitionInactive", "waits", "waits: its partition starts no jobs now", "slurm.partition", "choose another"),
    ("PartitionConfig", "waits", "requests more than the partition's working nodes have now", "slurm", "lower it"),
    ("JobHeldUser", "held", "is held by you", "", "release it with `scontrol release`"),
    ("JobHeldAdmin", "held", "is held by an administrator or after a failed start", "", "ask the administrators"),
    ("launch failed requeued held", "held", "is held: it could not be started", "", "see the node's logs"),
    ("job requeued in held state", "held", "is held after a requeue", "", "release it with `scontrol release`"),
    ("JobHoldMaxRequeue", "held", "is held after too many requeues", "", "cancel it"),
    ("DependencyNeverSatisfied", "never", "depends on a job that failed", "slurm.sbatch_options", "correct it"),
    ("Dependency", "waits", "waits for the jobs it depends on", "", ""),
    ("PartitionNodeLimit", "never", "has more nodes than its partition allows", "slurm.nodes", "change it"),
    ("PartitionTimeLimit", "never", "has a longer time than its partition allows", "slurm.time", "lower it"),
    ("AccountNotAllowed", "never", "has an account without access to its partition", "slurm.account", "name another"),
    ("InvalidAccount", "never", "has an account that no longer exists", "slurm.account", "name another"),
    ("QOSNotAllowed", "never", "has a QoS that its account or partition does not allow", "slurm.qos", "name another"),
    ("Job's QOS not permitted", "never", "has a QoS that its partition does not allow", "slurm.qos", "name another"),
    ("Job's account not", "never", "has an account without access to its partition", "slurm.account", "name another"),
    ("InvalidQOS", "never", "has a QoS that no longer exists", "slurm.qos", "name another"),
    ("BadConstraints", "never", "requests what no node has", "slurm.constraint", "request less"),
    ("ReservationDeleted", "never", "has a reservation that was deleted", "slurm.reservation", "leave it out"),
    ("DeadLine", "never", "cannot meet its deadline", "slurm.sbatch_options", "leave it out"),
)  # fmt: skip
# QOSMaxWallDurationPerJobLimit, AssocGrpGRES, QOSGrpCpuLimit, AssocMaxJobsLimit, MaxMemPerLimit, QOSMinGRES and so on.
_LIMIT = re.compile(r"^(QOS|Assoc|Max|Association|QoS|Qos)(Grp|Max|Min|Usage|Job|)(.*)$")
_RESOURCES = (
    (r"minutes", "CPU minutes", "slurm.time"),
    (r"wall|time", "time limit", "slurm.time"),
    (r"gres|gpu", "GPUs", "slurm.gpus_per_node"),
    (r"node", "nodes", "slurm.nodes"),
    (r"cpu", "CPUs", "slurm.cpus_per_rank"),
    (r"mem", "memory", "slurm.memory"),
    (r"submit|job", "number of jobs", ""),
)


def read_reason(text: str) -> Reason:
    """Meaning of a reason of squeue or scontrol. An unknown one counts as waiting and is shown as it is."""
    code = text.strip().strip("()").replace("_", " ")
    fitting = [row for row in _TABLE if code.lower().startswith(row[0].lower())]
    if fitting:
        _, kind, words, key, remedy = max(fitting, key=lambda row: len(row[0]))
        return Reason(code, kind, words + _nodes(code), key, remedy)
    return _limit(code) or Reason(code, "waits", f"waits ({code})" if code else "waits")


def _limit(code: str) -> Reason | None:
    match = _LIMIT.match(code)
    if match is None:
        return None
    owner = {"QOS": "its QoS", "MAX": "the site"}.get(match.group(1).upper(), "its account")
    resource, key = next(
        ((words, key) for pattern, words, key in _RESOURCES if re.search(pattern, match.group(3).lower())),
        ("resources", "slurm"),
    )
    if match.group(2) == "Min":
        return Reason(code, "never", f"requests less {resource} than {owner} requires", key, "raise it")
    if "PerJob" in code or "PerNode" in code or code == "MaxMemPerLimit" or resource == "time limit":
        return Reason(code, "never", f"exceeds the limit of {owner} on the {resource} of one job", key, "lower it")
    shared = "all jobs that share it" if match.group(2) == "Grp" else "all your jobs together"
    return Reason(code, "limit", f"waits: {owner} limits the {resource} of {shared}", key, "request less of it")


def _nodes(code: str) -> str:
    """The nodes that ``ReqNodeNotAvail, UnavailableNodes:node[1-2]`` names."""
    match = re.search(r"UnavailableNodes:\s*(\S+)", code)
    return f" ({match.group(1)})" if match and match.group(1) != "(null)" else ""
