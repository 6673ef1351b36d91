"""Diagnosis of an attempt's end, by its ranks' own records, srun's output and the hang watch. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhpc.core.attempts import Cause
from rlhpc.core.context import Reason
from rlhpc.core.errors import StoreError
from rlhpc.core.exits import EXIT_DISK_FULL, EXIT_STORAGE, ExitRecord, Kind, first_failure
from rlhpc.launch.supervise.hang_watch import Hang


@dataclass(frozen=True)
class Evidence:
    """Evidence on the end of an attempt. ``nodes`` have the ranks block by block; ``ends``: exit records by rank;
    ``output``: stderr of srun and of Slurm's daemons; ``seen``: Unix time at which srun was seen to end."""

    world_size: int
    nodes: tuple[str, ...]
    ends: Mapping[int, ExitRecord]
    output: str
    exit_code: int
    seen: float
    hang: Hang | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Cause of an attempt's end. ``rank`` -1: none in particular. ``detail``: traceback of the rank that failed first,
    or srun's output."""

    cause: Cause
    message: str = ""
    rank: int = -1
    node: str = ""
    detail: str = ""
    stopped: Reason = "none"


# Cause of a rank's error by its type and message; the first match counts.
_ERRORS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("hang", re.compile(r"^Hang: ")),
    ("non_finite", re.compile(r"^NonFiniteError: ")),
    ("stranger", re.compile(r"^StrangerError: ")),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded", re.I)),
    (
        "bad_node",
        re.compile(
            r"^(Node|Store)Error|uncorrectable (ECC|NVLink)|ECC error|\bXid\b|fallen off the bus|GPU is lost"
            r"|CUDA driver init|no CUDA-capable device|CUDA error: (unknown error|system not yet initialized"
            r"|device.*unavailable|hardware stack error)|CUDA unknown error|NVML.*(not found|Unknown Error)",
            re.I,
        ),
    ),
    (
        "gpu_memory",
        re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|No available memory", re.I),
    ),
    (
        "storage",
        re.compile(
            r"^StorageError|Input/output error|Remote I/O error|Stale file handle|Read-only file system"
            r"|transport endpoint shutdown",
            re.I,
        ),
    ),
    ("cpu_memory", re.compile(r"^MemoryError|Cannot allocate memory|not enough memory|can't allocate memory", re.I)),
)
_ONE_LINE = ("non_finite", "stranger")  # their message is the whole line
_OOM_KILL = re.compile(r"oom.kill|Out Of Memory|out of memory", re.I)
NODE_FAILURE = re.compile(r"Node failure on (\S+)", re.I)
_NOT_STARTED = re.compile(r"Task launch for \S+ failed on node ([\w.-]+): (.+)", re.I)
# srun: error: node2: tasks 4-7: Killed
TASKS = re.compile(r"^srun: error: ([\w.-]+): tasks? ([\d,-]+): (.+)$", re.M)
# srun: error: task 1 launch failed: Slurmd could not connect IO
_LAUNCH = re.compile(r"^srun: error: tasks? ([\d,-]+) launch failed: (.+)$", re.M)
# The allocation is gone, or not there yet. A step's credential is revoked when Slurm ends the job on a node.
_NO_ALLOCATION = re.compile(
    r"^srun: error: (?:Unable to (?:confirm allocation|create step) for job \d+: (?:Job is pending execution"
    r"|Invalid job id specified|Job/step already completing or completed|Job has already finished|Job is not running"
    r"|Job is not pending nor running)|Slurm job \d+ has expired|Job allocation \d+ has been revoked"
    r"|Task launch for \S+ failed on node [\w.-]+: Job credential revoked).*$",
    re.I | re.M,
)
# Errors that the same code raises again on the same data: a retry is useless.
_OF_THE_CODE = re.compile(
    r"^(Arithmetic|Assertion|Attribute|FloatingPoint|Import|Index|Key|Lookup|ModuleNotFound|Name|NotImplemented|Overflow"
    r"|Recursion|Syntax|Type|UnboundLocal|Unicode\w*|Value|ZeroDivision)Error$"
)
_DATA = re.compile(r"^(data|sft\.data)\.|\.(jsonl|parquet)\b")


def diagnose(evidence: Evidence, *, has_allocation: bool = False) -> Diagnosis:
    """Cause, message, and the rank and node at fault. ``has_allocation``: Slurm has confirmed that the job's allocation
    is still ours."""
    ends = evidence.ends
    kinds = {end.kind for end in ends.values()}
    if len(ends) == evidence.world_size and kinds == {"done"}:
        return Diagnosis("finished")
    if len(ends) == evidence.world_size and kinds <= {"done", "stopped"}:
        reason = next(end.message for end in ends.values() if end.kind == "stopped")
        return Diagnosis("stopped", "the ranks agreed to stop", stopped=reason)  # type: ignore[arg-type]
    gone, refused = NODE_FAILURE.search(evidence.output), _NOT_STARTED.search(evidence.output)
    if gone is not None:  # Slurm knows: it requeues the job itself, without the node
        return Diagnosis("requeued", f"node {gone[1]} failed", node=gone[1], detail=evidence.output[-4000:])
    no_allocation = _NO_ALLOCATION.search(evidence.output)
    if no_allocation is not None and not has_allocation:
        return Diagnosis("allocation_lost", no_allocation[0], detail=evidence.output[-4000:])
    if refused is not None:
        return Diagnosis("bad_node", f"ranks cannot be started on {refused[1]}: {refused[2]}", node=refused[1])
    launch = _LAUNCH.search(evidence.output)
    if launch is not None:
        rank = numbers_of(launch[1])[0]
        node = _node_of(rank, evidence)
        message = f"cannot be started on {node}: {launch[2]}; is the run folder on a shared file system?"
        return Diagnosis("bad_node", message, rank, node, evidence.output[-4000:])
    if evidence.hang is not None:
        hang = evidence.hang
        return Diagnosis("hang", hang.message, hang.rank, hang.node, hang.report)
    if (unreachable := _diagnose_store(evidence)) is not None:
        return unreachable
    failed = first_failure([*ends.values(), *_silent(evidence)])
    if failed is None or (failed.kind == "signal" and not ends and failed.message == NEVER_SEEN):
        lines = [line for line in evidence.output.splitlines() if "error" in line.lower()]
        message = lines[0] if lines else f"srun ended with {evidence.exit_code} before any rank had started"
        return Diagnosis("launch", message, detail=evidence.output[-4000:])
    if failed.kind in ("signal", "peer"):
        return _diagnose_silent(failed, evidence)
    return diagnose_error(failed)


def _diagnose_store(evidence: Evidence) -> Diagnosis | None:
    """Diagnosis if ranks could not reach the job's store. The fault is that of the first node, which has the store, if
    ranks of several nodes report it or its own ranks do."""
    found = [end for end in evidence.ends.values() if end.type == StoreError.__name__]
    if not found:
        return None
    first, store = min(found, key=lambda end: end.time), evidence.nodes[0]
    nodes = {end.node for end in found}
    node = store if len(nodes) > 1 else first.node
    message = f"{len(nodes)} nodes cannot reach {store}: {first.message}" if len(nodes) > 1 else first.message
    return Diagnosis("bad_node", message, first.rank if node == first.node else -1, node, first.traceback)


NEVER_SEEN = "ended without a record"
_ENDED_BY_SRUN = ("Terminated", "Killed")  # its words for the signals that it sends


def _silent(evidence: Evidence) -> list[ExitRecord]:
    """Records for ranks that left none, in the order of srun's output, whose first line is the first death. After a
    rank with a record of a failure, srun ends the others."""
    reported: dict[int, tuple[str, str, int]] = {}
    for order, match in enumerate(TASKS.finditer(evidence.output)):
        for rank in numbers_of(match[2]):
            reported.setdefault(rank, (match[1], match[3], order))
    failed = [rank for rank, end in evidence.ends.items() if end.kind in ("user", "error", "peer")]
    first_failed = min((reported[rank][2] for rank in failed if rank in reported), default=len(reported))
    found = []
    for rank in set(range(evidence.world_size)) - set(evidence.ends):
        node, message, order = reported.get(rank, (_node_of(rank, evidence), NEVER_SEEN, 1000))
        kind: Kind = "peer" if message in _ENDED_BY_SRUN and order > first_failed else "signal"
        found.append(ExitRecord(rank, node, 0, evidence.seen + order * 1e-3, kind, message=message))
    return found


def reports_failed_rank(output: str) -> bool:
    """True if srun's output reports a failed rank."""
    return TASKS.search(output) is not None or _LAUNCH.search(output) is not None


def _node_of(rank: int, evidence: Evidence) -> str:
    return evidence.nodes[rank * len(evidence.nodes) // evidence.world_size]


def numbers_of(text: str) -> list[int]:
    """Numbers in a list such as 0,4-6."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _diagnose_silent(failed: ExitRecord, evidence: Evidence) -> Diagnosis:
    """Diagnosis for a rank that was killed, or for ranks that only lost each other."""
    known = Diagnosis("crash", failed.message, failed.rank, failed.node, evidence.output[-4000:])
    if failed.kind == "signal" and f"exit code {EXIT_DISK_FULL}" in failed.message:
        return replace(known, cause="disk_full", message="no space left on the device of the run folder")
    if failed.kind == "signal" and f"exit code {EXIT_STORAGE}" in failed.message:
        return replace(known, cause="storage", message="the file system of the run folder failed")
    if failed.kind == "signal" and _OOM_KILL.search(evidence.output + failed.message):
        return replace(known, cause="cpu_memory", message=f"{failed.message}: out of CPU memory")
    if failed.kind == "peer":
        message = f"{failed.type}: {failed.message}" if failed.type else failed.message
        early = [end.rank for end in evidence.ends.values() if end.kind == "done" and end.time < failed.time]
        if early:
            message += f" (rank {min(early)} had ended before, without an error)"
        return replace(known, cause="network", message=message, detail=failed.traceback)
    return known


def diagnose_error(failed: ExitRecord) -> Diagnosis:
    """Diagnosis from the record of the rank that failed first alone."""
    text = f"{failed.type}: {failed.message}"
    message = failed.message if failed.kind == "user" else text
    known = Diagnosis("crash", message, failed.rank, failed.node, failed.traceback)
    for cause, pattern in _ERRORS:
        if pattern.search(text):
            return replace(known, cause=cause, message=failed.message if cause in _ONE_LINE else message)
    if failed.kind == "user":
        return replace(known, cause="data" if _DATA.search(failed.message) else "user")
    return replace(known, cause="user") if _OF_THE_CODE.match(failed.type) else known
