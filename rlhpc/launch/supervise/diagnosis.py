"""Why the ranks of a start ended: from their own records, what srun said, and what the watch for hangs saw. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhpc.core.attempts import Cause
from rlhpc.core.exits import EXIT_DISK_FULL, EXIT_STORAGE, ExitRecord, Kind, culprit
from rlhpc.core.stop import Reason
from rlhpc.launch.supervise.hang_watch import Hang


@dataclass(frozen=True)
class Evidence:
    """``nodes`` hold the ranks block by block; ``ends``: the exit records there are, by rank; ``output``: what srun and
    the daemons wrote to stderr; ``seen``: when srun was seen to end, in seconds since 1970."""

    world_size: int
    nodes: tuple[str, ...]
    ends: Mapping[int, ExitRecord]
    output: str
    exit_code: int
    seen: float
    hang: Hang | None = None


@dataclass(frozen=True)
class Diagnosis:
    """``rank`` -1: none in particular. ``detail`` is the culprit's traceback or what srun said."""

    cause: Cause
    message: str = ""
    rank: int = -1
    node: str = ""
    detail: str = ""
    stopped: Reason = "none"


# Which cause a rank's error has, by its type and message; the first that fits.
_ERRORS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    ("hang", re.compile(r"^Hang: ")),
    ("non_finite", re.compile(r"^NonFiniteError: ")),
    ("disk_full", re.compile(r"No space left on device|Disk quota exceeded", re.I)),
    (
        "bad_node",
        re.compile(
            r"^NodeError|uncorrectable (ECC|NVLink)|ECC error|\bXid\b|fallen off the bus|GPU is lost|CUDA driver init"
            r"|no CUDA-capable device|CUDA error: (unknown error|system not yet initialized|device.*unavailable"
            r"|hardware stack error)|CUDA unknown error|NVML.*(not found|Unknown Error)",
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
    ("host_memory", re.compile(r"^MemoryError|Cannot allocate memory|not enough memory|can't allocate memory", re.I)),
)
_OOM_KILL = re.compile(r"oom.kill|Out Of Memory|out of memory", re.I)
_NODE_FAILURE = re.compile(r"Node failure on (\S+)", re.I)
_NOT_STARTED = re.compile(r"Task launch for \S+ failed on node ([\w.-]+): (.+)", re.I)
# srun: error: node2: tasks 4-7: Killed
_TASKS = re.compile(r"^srun: error: ([\w.-]+): tasks? ([\d,-]+): (.+)$", re.M)
# srun: error: task 1 launch failed: Slurmd could not connect IO
_LAUNCH = re.compile(r"^srun: error: tasks? ([\d,-]+) launch failed: (.+)$", re.M)
# Errors that the same code on the same data raises again: there is no use in a retry.
_OF_THE_CODE = re.compile(
    r"^(Arithmetic|Assertion|Attribute|FloatingPoint|Import|Index|Key|Lookup|ModuleNotFound|Name|NotImplemented|Overflow"
    r"|Recursion|Syntax|Type|UnboundLocal|Unicode\w*|Value|ZeroDivision)Error$"
)
_DATA = re.compile(r"^(data|sft\.data)\.|\.(jsonl|parquet)\b")


def diagnose(evidence: Evidence) -> Diagnosis:
    """The cause, the rank and node where it began, and a line that says it."""
    ends = evidence.ends
    kinds = {end.kind for end in ends.values()}
    if len(ends) == evidence.world_size and kinds == {"done"}:
        return Diagnosis("finished")
    if len(ends) == evidence.world_size and kinds <= {"done", "stopped"}:
        reason = next(end.message for end in ends.values() if end.kind == "stopped")
        return Diagnosis("stopped", "the ranks agreed to stop", stopped=reason)  # type: ignore[arg-type]
    gone, refused = _NODE_FAILURE.search(evidence.output), _NOT_STARTED.search(evidence.output)
    if gone is not None:  # Slurm knows, gives the node to nobody until it is back, and requeues the job itself
        return Diagnosis("requeued", f"node {gone[1]} failed", node=gone[1], detail=evidence.output[-4000:])
    if refused is not None:
        return Diagnosis("bad_node", f"ranks cannot be started on {refused[1]}: {refused[2]}", node=refused[1])
    launch = _LAUNCH.search(evidence.output)
    if launch is not None:
        rank = _numbers(launch[1])[0]
        node = _node_of(rank, evidence)
        message = f"cannot be started on {node}: {launch[2]}; is the run folder on a file system that it shares?"
        return Diagnosis("bad_node", message, rank, node, evidence.output[-4000:])
    if evidence.hang is not None:
        hang = evidence.hang
        return Diagnosis("hang", hang.message, hang.rank, hang.node, hang.report)
    failed = culprit([*ends.values(), *_silent(evidence)])
    if failed is None or (failed.kind == "signal" and not ends and failed.message == _NEVER_SEEN):
        return _not_launched(evidence)
    if failed.kind in ("signal", "peer"):
        return _without_a_word(failed, evidence)
    return diagnose_error(failed)


_NEVER_SEEN = "ended without a word"
_ENDED_BY_SRUN = ("Terminated", "Killed")  # as it says it of the signals it sends


def _silent(evidence: Evidence) -> list[ExitRecord]:
    """Records for ranks that left none, in the order in which srun spoke of them: its first line is the first death.
    After the end of a rank that has told of a failure, it is srun that ends the others."""
    told: dict[int, tuple[str, str, int]] = {}
    for order, match in enumerate(_TASKS.finditer(evidence.output)):
        for rank in _numbers(match[2]):
            told.setdefault(rank, (match[1], match[3], order))
    failed = [rank for rank, end in evidence.ends.items() if end.kind in ("user", "error", "peer")]
    first_failed = min((told[rank][2] for rank in failed if rank in told), default=len(told))
    found = []
    for rank in set(range(evidence.world_size)) - set(evidence.ends):
        node, message, order = told.get(rank, (_node_of(rank, evidence), _NEVER_SEEN, 1000))
        kind: Kind = "peer" if message in _ENDED_BY_SRUN and order > first_failed else "signal"
        found.append(ExitRecord(rank, node, 0, evidence.seen + order * 1e-3, kind, message=message))
    return found


def tells_of_a_failed_rank(output: str) -> bool:
    """srun has reported the end of a rank that it took for a failure."""
    return _TASKS.search(output) is not None or _LAUNCH.search(output) is not None


def _node_of(rank: int, evidence: Evidence) -> str:
    return evidence.nodes[rank * len(evidence.nodes) // evidence.world_size]


def _numbers(text: str) -> list[int]:
    """0,4-6 is 0, 4, 5, 6."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _not_launched(evidence: Evidence) -> Diagnosis:
    lines = [line for line in evidence.output.splitlines() if "error" in line.lower()]
    message = lines[0] if lines else f"srun ended with {evidence.exit_code} before any rank had started"
    return Diagnosis("launch", message, detail=evidence.output[-4000:])


def _without_a_word(failed: ExitRecord, evidence: Evidence) -> Diagnosis:
    """A rank that was killed, or ranks that only lost each other."""
    known = Diagnosis("crash", failed.message, failed.rank, failed.node, evidence.output[-4000:])
    if failed.kind == "signal" and f"exit code {EXIT_DISK_FULL}" in failed.message:
        return replace(known, cause="disk_full", message="no space left on the device of the run folder")
    if failed.kind == "signal" and f"exit code {EXIT_STORAGE}" in failed.message:
        return replace(known, cause="storage", message="the file system of the run folder failed")
    if failed.kind == "signal" and _OOM_KILL.search(evidence.output + failed.message):
        return replace(known, cause="host_memory", message=f"{failed.message}: out of memory on the host")
    if failed.kind == "peer":
        message = f"{failed.type}: {failed.message}" if failed.type else failed.message
        return replace(known, cause="network", message=message, detail=failed.traceback)
    return known


def diagnose_error(failed: ExitRecord) -> Diagnosis:
    """The same from the record of the rank to blame alone."""
    text = f"{failed.type}: {failed.message}"
    message = failed.message if failed.kind == "user" else text
    known = Diagnosis("crash", message, failed.rank, failed.node, failed.traceback)
    for cause, pattern in _ERRORS:
        if pattern.search(text):
            return replace(known, cause=cause, message=failed.message if cause == "non_finite" else message)
    if failed.kind == "user":
        return replace(known, cause="data" if _DATA.search(failed.message) else "user")
    return replace(known, cause="user") if _OF_THE_CODE.match(failed.type) else known
