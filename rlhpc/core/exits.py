"""Records of how each rank started and ended, and which rank failed first.

Launchers report only that some rank failed; the first traceback is usually that of a rank that lost its connection to
the one that failed. So every rank writes its own record, and the cause is found by comparing them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlhpc.core.errors import NonFiniteError, StrangerError, UserError
from rlhpc.core.files import make_folder, names_in, read_json, read_text, rename, write_json
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import RankInfo
from rlhpc.core.redaction import redact
from rlhpc.core.shown import show
from rlhpc.core.storage import BRIEF, NONE, Patience, StorageError, exists, kind_of

Kind = Literal["user", "error", "peer", "signal", "stopped", "done"]

# sysexits.h EX_IOERR and EX_TEMPFAIL: exit codes for a full disk and a failing file system, on which no record can be
# written.
EXIT_DISK_FULL, EXIT_STORAGE = 74, 75

# Errors caused by the end of another rank or of the launcher. Some also have other causes, which is harmless: such a
# record only ranks behind one that cannot have been caused from outside.
_PEER_TYPES = {
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
    "PeerLost",
}
_PEER_MESSAGE = re.compile(
    r"connection (closed|reset|refused|was closed|aborted)|broken pipe|socket (closed|timeout)|nccl|gloo"
    r"|failed to recv, got 0 bytes|recvvalue failed|sendbytes failed|timed out (waiting|after)"
    r"|collective operation timeout|process group .*(shut down|aborted)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class StartRecord:
    rank: int
    node: str
    process: ProcessId
    time: float


@dataclass(frozen=True)
class ExitRecord:
    """End of a rank. ``kind``: ``user``: a UserError; ``error``: another error; ``peer``: the loss of a peer;
    ``signal``: death without a record; ``stopped``: a stop that the ranks agreed on (``message``: why, see
    rlhpc.core.context); ``done``: success."""

    rank: int
    node: str
    pid: int
    time: float
    kind: Kind
    type: str = ""
    message: str = ""
    traceback: str = ""


def classify(error: BaseException) -> Kind:
    """Kind of an exception, by it and its causes."""
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, SystemExit):
        return "error" if error.code else "done"
    if isinstance(error, NonFiniteError | StorageError | StrangerError):  # their messages may look like a lost peer
        return "error"
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ in _PEER_TYPES or _PEER_MESSAGE.search(str(cause)):
            return "peer"
        cause = cause.__cause__ or cause.__context__
    return "error"


def run_recorded(exits: Path, info: RankInfo, function: Callable[[], str | None]) -> None:
    """Calls ``function``, and writes a start record before and an exit record after it, even on errors.

    ``function`` returns why it stopped early, None if it did not. The traceback of an error that the user cannot fix is
    in the log before its record exists: whoever reads the record may kill this process.
    """
    reported: BaseException | None = None
    try:
        write_start(exits, info)
        try:
            stopped = function()
        except BaseException as error:
            reported = error
            _report(error)
            write_exit(exits, info, error)
            raise
        write_exit(exits, info, stopped=stopped)
    except BaseException as error:
        if error is not reported:
            _report(error)
        if isinstance(error, StorageError):
            os._exit(EXIT_STORAGE)
        if isinstance(error, OSError) and kind_of(error) == "full":
            os._exit(EXIT_DISK_FULL)
        raise


def _report(error: BaseException) -> None:
    """Prints the traceback, except of a UserError, whose one line the launcher shows."""
    if not isinstance(error, UserError):
        show(redact(_traceback(error)), end="", file=sys.stderr)


def write_start(exits: Path, info: RankInfo) -> None:
    """Records the start of this process as the rank."""
    record = StartRecord(info.job_rank, info.node, ProcessId.own(), time.time())
    write_json(_file(exits, info.job_rank, "start"), asdict(record))


def write_exit(exits: Path, info: RankInfo, error: BaseException | None = None, stopped: str | None = None) -> None:
    """Records how the rank ended; the first record of a process stays."""
    kind: Kind = "stopped" if stopped else "done"
    record = ExitRecord(info.job_rank, info.node, os.getpid(), time.time(), kind, message=stopped or "")
    if error is not None:
        text, message = redact(_traceback(error)), redact(str(error))
        ended = {"kind": classify(error), "type": type(error).__name__, "message": message, "traceback": text}
        record = ExitRecord(**{**asdict(record), **ended})
    file = _file(exits, info.job_rank, "exit")
    patience = BRIEF if isinstance(error, StorageError) else None  # it has already waited
    if not _is_written(file, patience):
        write_json(file, asdict(record), patience)


def without_secrets(error: Exception) -> Exception:
    """The error itself, or if its traceback contains secrets, one to raise ``from None`` in its place: submitit keeps
    the traceback of what its jobs raise."""
    text = _traceback(error)
    shown = redact(text)
    if shown == text or isinstance(error, OSError):
        return error
    if isinstance(error, UserError):  # its own text has none
        return type(error)(error.message, where=error.where, remedy=error.remedy)
    return RuntimeError(shown)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _is_written(file: Path, patience: Patience | None) -> bool:
    """True if this process has written the exit record."""
    return exists(file, patience) and bool(read_json(file, patience)["pid"] == os.getpid())


def read_starts(exits: Path, patience: Patience | None = None) -> dict[int, StartRecord]:
    """Start records by rank."""
    records = _read(exits, "start", patience)
    return {record["rank"]: _start_of(record) for record in records}


def read_start(exits: Path, rank: int) -> StartRecord | None:
    """Start record of a rank; None if there is none, or if it cannot be read now."""
    try:
        return _start_of(read_json(_file(exits, rank, "start"), NONE))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_exit(exits: Path, rank: int) -> ExitRecord | None:
    """Exit record of a rank; None if there is none, or if it cannot be read now."""
    try:
        return ExitRecord(**read_json(_file(exits, rank, "exit"), NONE))
    except (OSError, ValueError, TypeError):
        return None


def read_exits(exits: Path) -> dict[int, ExitRecord]:
    """Exit records by rank."""
    return {record["rank"]: ExitRecord(**record) for record in _read(exits, "exit")}


def put_aside(exits: Path, ranks: Iterable[int], folder: Path) -> None:
    """Moves the records of ranks that are started again."""
    make_folder(folder)
    for rank in ranks:
        for what in ("start", "exit"):
            if exists(_file(exits, rank, what)):
                rename(_file(exits, rank, what), _file(folder, rank, what))


def all_ended(exits: Path, ranks: range) -> bool:
    """True if each of the ranks has written an exit record; False if the folder cannot be read now."""
    try:
        return {*names_in(exits, "rank-*.exit.json", NONE)} >= {_file(exits, rank, "exit").name for rank in ranks}
    except OSError:
        return False


def first_failure(records: Iterable[ExitRecord]) -> ExitRecord | None:
    """Record of the rank that failed first, by itself; None if no rank failed.

    Ranks that died without a record have one of kind ``signal`` with the time they were found dead. Precedence: the
    earliest UserError; the earliest other error or silent death; the earliest loss of a peer.
    """
    ordered = sorted(records, key=lambda record: record.time)

    def first(*kinds: Kind) -> ExitRecord | None:
        return next((record for record in ordered if record.kind in kinds), None)

    return first("user") or first("signal", "error") or first("peer")


def _start_of(record: dict) -> StartRecord:
    return StartRecord(**{**record, "process": ProcessId(**record["process"])})


def _file(exits: Path, rank: int, what: str) -> Path:
    return exits / f"rank-{rank:05d}.{what}.json"


def _read(exits: Path, what: str, patience: Patience | None = None) -> list[dict]:
    names = names_in(exits, f"rank-*.{what}.json", patience)
    return [json.loads(read_text(exits / name, patience)) for name in names]
