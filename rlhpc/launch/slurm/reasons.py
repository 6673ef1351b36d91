"""Why a job waits, in plain words, and whether it can ever start as asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["waits", "limit", "held", "never"]


@dataclass(frozen=True)
class Reason:
    """One queue reason. ``kind``: it waits its turn; for a limit that jobs share, and for ever if this one alone is
    above it; until somebody releases it; or it can never start as asked. ``key`` is the config's to change then."""

    code: str
    kind: Kind
    words: str
    key: str = ""
    remedy: str = ""


# By the code's beginning; the longest that fits counts. Kind, words, key, remedy.
_TABLE: tuple[tuple[str, Kind, str, str, str], ...] = (
    ("None", "waits", "waits to be looked at by the scheduler", "", ""),
    ("Priority", "waits", "waits behind jobs of higher priority", "", ""),
    ("Resources", "waits", "is next and waits for free nodes", "", ""),
    ("BeginTime", "waits", "waits for its earliest start, as after a requeue", "", ""),
    ("Cleaning", "waits", "waits until its earlier start has been cleaned up", "", ""),
    ("Prolog", "waits", "is being set up on its nodes", "", ""),
    ("JobArrayTaskLimit", "waits", "waits for other jobs of its array", "", ""),
    ("Licenses", "waits", "waits for a licence", "", ""),
    ("Reservation", "waits", "waits for the beginning of its reservation", "", ""),
    ("ReqNodeNotAvail", "waits", "waits for nodes that are down, drained or reserved", "", ""),
    ("Nodes required for job are DOWN", "waits", "waits for nodes that are down, drained or reserved", "", ""),
    ("NodeDown", "waits", "waits for a node that is down", "", ""),
    ("PartitionDown", "waits", "waits: its partition takes no jobs now", "slurm.partition", "choose another"),
    ("PartitionInactive", "waits", "waits: its partition starts no jobs now", "slurm.partition", "choose another"),
    ("PartitionConfig", "waits", "asks for more than the partition's working nodes have now", "slurm", "lower it"),
    ("JobHeldUser", "held", "is held by you", "", "release it with `scontrol release`"),
    ("JobHeldAdmin", "held", "is held by an administrator or after a failed start", "", "ask the administrators"),
    ("launch failed requeued held", "held", "is held: it could not be started", "", "see the node's logs"),
    ("job requeued in held state", "held", "is held after a requeue", "", "release it with `scontrol release`"),
    ("JobHoldMaxRequeue", "held", "was requeued too often and is held", "", "cancel it"),
    ("DependencyNeverSatisfied", "never", "depends on a job that failed", "slurm.sbatch_options", "correct it"),
    ("Dependency", "waits", "waits for the jobs it depends on", "", ""),
    ("PartitionNodeLimit", "never", "has more nodes than its partition allows", "slurm.nodes", "change it"),
    ("PartitionTimeLimit", "never", "has a longer time than its partition allows", "slurm.time", "lower it"),
    ("AccountNotAllowed", "never", "has an account that may not use its partition", "slurm.account", "name another"),
    ("InvalidAccount", "never", "has an account that does not exist any more", "slurm.account", "name another"),
    ("QOSNotAllowed", "never", "has a QoS that its account or partition does not allow", "slurm.qos", "name another"),
    ("Job's QOS not permitted", "never", "has a QoS that its partition does not allow", "slurm.qos", "name another"),
    ("Job's account not", "never", "has an account that may not use its partition", "slurm.account", "name another"),
    ("InvalidQOS", "never", "has a QoS that does not exist any more", "slurm.qos", "name another"),
    ("BadConstraints", "never", "asks for what no node can ever give", "slurm.constraint", "ask for less"),
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
    """What a reason of squeue or scontrol means. One that is not known waits, and is shown as it is."""
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
        return Reason(code, "never", f"asks for less {resource} than {owner} demands", key, "raise it")
    if "PerJob" in code or "PerNode" in code or code == "MaxMemPerLimit" or resource == "time limit":
        return Reason(code, "never", f"is above the limit of {owner} on the {resource} of one job", key, "lower it")
    shared = "all jobs that share it" if match.group(2) == "Grp" else "all your jobs together"
    return Reason(code, "limit", f"waits: {owner} limits the {resource} of {shared}", key, "ask for less of it")


def _nodes(code: str) -> str:
    """``ReqNodeNotAvail, UnavailableNodes:node[1-2]`` names them."""
    match = re.search(r"UnavailableNodes:\s*(\S+)", code)
    return f" ({match.group(1)})" if match and match.group(1) != "(null)" else ""
