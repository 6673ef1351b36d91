"""State of jobs from squeue, scontrol or sacct, and the reasons why queued jobs wait.

No JSON: ``squeue --json`` of some versions ignores -j, and the types of its fields change between versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhpc.core.errors import UserError
from rlhpc.launch.slurm.commands import AWAY, ask, last_line, output_of, seconds_of, time_of

_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_STARTED = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "RESIZING", "REQUEUE_FED")
LIVE = frozenset((*_QUEUED, *_STARTED))
STATE_WORDS = {
    "PENDING": "queued",
    "RUNNING": "running",
    "CONFIGURING": "starting",
    "COMPLETING": "ending",
    "COMPLETED": "ended",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "out of time",
    "NODE_FAIL": "node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "REQUEUED": "queued",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
}
# Flags beside a state, which do not show if the job is live, with the state that one implies alone.
# https://slurm.schedmd.com/job_state_codes.html
_FLAGS = {
    "EXPEDITING": "PENDING",
    "LAUNCH_FAILED": "PENDING",
    "POWER_UP_NODE": "CONFIGURING",
    "RECONFIG_FAIL": "RUNNING",
    "SIGNALING": "RUNNING",
    "UPDATE_DB": "COMPLETING",
}
# The reason comes last: it is free text in some versions.
_SQUEUE = "%i|%T|%S|%e|%L|%N|%r"
_SACCT = "JobID,State,Start,End,NodeList,ExitCode,Reason"
Kind = Literal["waits", "limit", "held", "never"]

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


@dataclass(frozen=True)
class JobStatus:
    """State of one job in Slurm. ``start`` of a queued job is the expected one; ``time_left`` in seconds; ``end`` and
    ``time_left`` are None while the job is suspended.

    ``restarts`` and ``exit_code`` (CODE:SIGNAL) are known from scontrol and sacct only.
    """

    job_id: str
    state: str
    reason: str = ""
    start: float | None = None
    end: float | None = None
    time_left: int | None = None
    nodes: str = ""
    restarts: int | None = None
    exit_code: str = ""
    source: Literal["squeue", "scontrol", "sacct"] = "squeue"

    @property
    def live(self) -> bool:
        """Queued, running, or between the two."""
        return self.state in LIVE

    @property
    def queued(self) -> bool:
        return self.state in _QUEUED

    @property
    def words(self) -> str:
        return STATE_WORDS.get(self.state, self.state.lower().replace("_", " "))

    @property
    def why(self) -> Reason:
        """The reason why a queued job waits."""
        return read_reason(self.reason)


def read_jobs(ids: Iterable[str], cluster: str | None = None) -> dict[str, JobStatus]:
    """Jobs that Slurm still knows, by id (array elements as 7_3). Raises UserError if Slurm does not answer.

    ``cluster``: their cluster; default: this machine's.
    """
    wanted = sorted(set(ids))
    if not wanted:
        return {}
    found = _from_squeue(wanted, cluster)
    missing = [job_id for job_id in wanted if job_id not in found]
    if len(missing) == 1:
        found |= _from_scontrol(missing[0], cluster)
    missing = [job_id for job_id in missing if job_id not in found]
    return found | (_from_sacct(missing, cluster) if missing else {})


def read_job(job_id: str, cluster: str | None = None, *, detail: bool = False) -> JobStatus | None:
    """One job; None if Slurm does not know it, or no longer. ``detail``: with restarts, by scontrol."""
    if detail and (status := _from_scontrol(job_id, cluster).get(job_id)) is not None:
        return status
    return read_jobs([job_id], cluster).get(job_id)


def parse_squeue(text: str) -> dict[str, JobStatus]:
    """Lines of ``squeue -h -r -o`` with this module's format."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.strip().split("|", 6)]
        if len(fields) == 7 and re.fullmatch(r"\d+(_\d+)?", fields[0]):
            job_id, state, start, end, left, nodes, reason = fields
            seconds = seconds_of(left) if _state(state) == "RUNNING" else None  # of a queued job it is the whole limit
            found[job_id] = JobStatus(
                job_id, _state(state), _reason(reason), time_of(start), _end(state, end), seconds, nodes
            )
    return found


def parse_scontrol(text: str) -> dict[str, JobStatus]:
    """Lines of ``scontrol show job -o``; values may contain blanks; a name begins after one and ends with ``=``."""
    found = {}
    for line in text.splitlines():
        pairs = re.findall(r"(?:^|\s)([A-Za-z][\w/:]*)=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", line.strip())
        fields = dict(reversed(pairs))  # the first of a name counts: SubmitLine comes late and contains anything
        if "JobState" not in fields:
            continue
        job_id = fields.get("JobId", "")
        if fields.get("ArrayTaskId", "").isdecimal():
            job_id = f"{fields.get('ArrayJobId', job_id)}_{fields['ArrayTaskId']}"
        restarts = fields.get("Restarts", "")
        found[job_id] = JobStatus(
            job_id,
            _state(fields["JobState"]),
            _reason(fields.get("Reason", "")),
            time_of(fields.get("StartTime", "")),
            _end(fields["JobState"], fields.get("EndTime", "")),
            _left(fields),
            "" if fields.get("NodeList") in (None, "(null)") else fields["NodeList"],
            int(restarts) if restarts.isdecimal() else None,
            fields.get("ExitCode", ""),
            "scontrol",
        )
    return found


def job_record(text: str, number: str) -> str:
    """The line of one job in ``scontrol show job -o``; empty without it. An array's own number shows all elements, and
    is the number of one of them."""
    return next((line for line in text.splitlines() if line.startswith(f"JobId={number} ")), "")


def parse_sacct(text: str) -> dict[str, JobStatus]:
    """Lines of ``sacct -n -P -X`` with this module's format; of a job that was requeued the last line counts."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 6)
        if len(fields) == 7 and re.fullmatch(r"\d+(_\d+)?", fields[0]):
            job_id, state, start, end, nodes, exit_code, reason = fields
            known = JobStatus(job_id, _state(state), _reason(reason), time_of(start), time_of(end), source="sacct")
            nodes = "" if nodes == "None assigned" else nodes
            found[job_id] = replace(known, nodes=nodes, exit_code=exit_code)
    return found


def _from_squeue(ids: Sequence[str], cluster: str | None) -> dict[str, JobStatus]:
    answer = ask("squeue", "-h", "-r", "-a", "-t", "all", "-o", _SQUEUE, "-j", ",".join(ids), cluster=cluster)
    if answer.code and "invalid job id" not in answer.err.lower():
        raise UserError(f"squeue failed: {last_line(answer.err)}", where="slurm", remedy="see `scontrol ping`")
    return parse_squeue(answer.out)


def _from_scontrol(job_id: str, cluster: str | None) -> dict[str, JobStatus]:
    """Job by scontrol, which remembers a finished job for MinJobAge, some minutes."""
    answer = ask("scontrol", "show", "job", "-o", job_id, cluster=cluster)
    if answer.code and AWAY.search(answer.err):
        raise UserError(f"scontrol failed: {last_line(answer.err)}", where="slurm", remedy="see `scontrol ping`")
    return parse_scontrol(answer.out) if answer.code == 0 else {}


def _from_sacct(ids: Sequence[str], cluster: str | None) -> dict[str, JobStatus]:
    """Jobs by sacct; none without it or its database."""
    return parse_sacct(output_of("sacct", "-n", "-P", "-X", "-o", _SACCT, "-j", ",".join(ids), cluster=cluster))


def _state(text: str) -> str:
    """State without flags: ``CANCELLED by 1000`` and ``CANCELLED+`` are CANCELLED. Of several, as in
    ``RUNNING,COMPLETING`` or in an array of JSON (from 23.11 on), the last one counts that shows whether the job is
    live.

    A flag may replace the state: SIGNALING while Slurm delivers a signal to the processes of a job that runs.
    """
    words = [word for word in re.findall(r"[A-Z_]+", text.upper().partition(" BY ")[0]) if word.strip("_")]
    known = [word for word in words if word not in _FLAGS] or [_FLAGS[word] for word in words]
    return known[-1] if known else "UNKNOWN"


def _end(state: str, text: str) -> float | None:
    """End of a job, for a running one by its limit; unknown while it is suspended, because Slurm moves it
    afterwards."""
    return None if _state(state) == "SUSPENDED" else time_of(text)


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)", "") else text


def _left(fields: dict[str, str]) -> int | None:
    limit, used = seconds_of(fields.get("TimeLimit", "")), seconds_of(fields.get("RunTime", ""))
    if _state(fields["JobState"]) != "RUNNING" or limit is None or used is None:
        return None
    return max(0, limit - used)


@dataclass(frozen=True)
class Reason:
    """One queue reason. ``kind``: ``waits`` for its turn; ``limit``: for a limit that jobs share, forever if this job
    alone exceeds it; ``held`` until released; ``never`` starts as requested, unless ``key`` of the config changes."""

    code: str
    kind: Kind
    words: str
    key: str = ""
    remedy: str = ""


def read_reason(text: str) -> Reason:
    """Meaning of a reason of squeue or scontrol. An unknown one counts as waiting and is shown verbatim."""
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
