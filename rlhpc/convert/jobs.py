"""Names of the processes that work in a staging folder: share, host, machine, pid, start and a random part."""

from __future__ import annotations

import hashlib
import re
import secrets
import socket

from rlhpc.core.owner_lock import machine
from rlhpc.core.process import ProcessId

ENDED = ".ended"  # appended by the process itself when it ends
_JOB = re.compile(
    r"(?P<share>\w+)\.[\w.-]*-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}(?P<ended>\.ended)?"
)


def own_job(share: str | None) -> str:
    """A name for this process, which writes a share or all, that no other process has had."""
    process = ProcessId.own()
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return f"{share or 'all'}.{host}-{_machine()}-{process.pid}-{process.start}-{secrets.token_hex(4)}"


def is_job(name: str) -> bool:
    """Whether it is the name of a process."""
    return _JOB.fullmatch(name) is not None


def share_of(name: str) -> str:
    """Share that the process writes."""
    found = _JOB.fullmatch(name)
    return found["share"] if found else ""


def has_ended(name: str) -> bool:
    """Whether the process has certainly ended: by its own word, or because it ran on this machine and is gone."""
    found = _JOB.fullmatch(name)
    if found is None or found["ended"]:
        return found is not None
    process = ProcessId(int(found["pid"]), int(found["start"]))
    return found["machine"] == _machine() and not process.is_alive()


def _machine() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]
