"""The batch step's view of its own job: who is in it, when it ends, how it is requeued. Any Slurm from 22.05 on."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.storage import NONE, say
from rlhpc.launch.slurm.commands import ask
from rlhpc.launch.slurm.times import time_of

_COMMAND_SECONDS = 30.0
_DEADLINE_SECONDS = 20.0
_AWAY = re.compile(r"unable to contact|timed out|connection refused|zero bytes", re.I)
_LONG_PAUSE = 1.0
_AWAY_PAUSES = (0.2, 1.0, 5.0, 15.0, *[30.0] * 20, 0.0)


@dataclass(frozen=True)
class BatchJob:
    """A running job, from the environment of its batch step.

    ``name`` is what commands take (7_3 for an element of an array): the last element's own number is its array's too,
    and a requeue by it would requeue every element. ``groups``: the nodes of each group of a heterogeneous job, or one.
    """

    job_id: str
    name: str
    restart_count: int
    groups: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, in the order of the ranks."""
        return tuple(node for group in self.groups for node in group)

    @classmethod
    def from_environ(cls) -> BatchJob:
        """Read Slurm's variables; a UserError outside of a job."""
        job_id, nodes = os.environ.get(env.SLURM_JOB_ID), os.environ.get(env.SLURM_JOB_NODELIST)
        if not job_id or not nodes:
            raise UserError(
                "this is no Slurm job", where=env.SLURM_JOB_ID, remedy="start it with sbatch or rlhpc submit"
            )
        groups = [nodes]
        for group in range(1, int(os.environ.get(env.SLURM_HET_SIZE, "1"))):
            groups.append(os.environ[env.of_het_group(env.SLURM_JOB_NODELIST, group)])
        names = [tuple(_told("scontrol", "show", "hostnames", group).split()) for group in groups]
        assert all(names), f"scontrol show hostnames does not know {groups}"
        return cls(job_id, job_name(), int(os.environ.get(env.SLURM_RESTART_COUNT, "0")), tuple(names))

    def end_time(self) -> float | None:
        """When Slurm ends the job, in seconds since 1970; None without a time limit or an answer.

        Just after a requeue Slurm may still tell the end of the time before, which is past.
        """
        told = _told("squeue", "-h", "-j", self.name, "-o", "%e").split()  # a line for each group
        end = min((found for text in told if (found := time_of(text)) is not None), default=0.0)
        return end if end > time.time() else None

    def partition_nodes(self) -> tuple[str, ...]:
        """Every node of the job's partition, in whatever state; none when Slurm does not say."""
        partition = os.environ.get(env.SLURM_JOB_PARTITION, "")
        return tuple(_told("sinfo", "-h", "-N", "-p", partition, "-o", "%N").split()) if partition else ()

    def signal_ranks(self) -> None:
        """SIGURG to every rank, which then writes its stacks (rlhpc.core.heartbeat); others ignore it."""
        _succeeds("scancel", "--signal=URG", self.job_id)

    def requeue(self, excluded: Sequence[str]) -> bool:
        """Put this job back into the queue, without the ``excluded`` nodes; Slurm then ends this batch step.

        A controller that is away is waited for: without it the run would end here for want of one command.
        """
        if not _succeeds("scontrol", "requeue", self.name, pauses=_AWAY_PAUSES):
            return False
        if excluded:  # only a pending job can be changed, which it is now; the step lives on for Slurm's KillWait
            _succeeds("scontrol", "update", f"JobId={self.name}", f"ExcNodeList={','.join(excluded)}")
        return True


class Deadline:
    """Keeps the job's end in the attempt's folder, where rank 0 looks: an administrator may move it."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._attempt: AttemptFolder | None = None
        self._written: tuple[AttemptFolder, float] | None = None
        self._lock = threading.Lock()
        self.end: float | None = None
        self.look()
        threading.Thread(target=self._keep, name="deadline", daemon=True).start()

    def seconds_left(self) -> float:
        """Infinite without a limit."""
        return float("inf") if self.end is None else self.end - time.time()

    def follow(self, attempt: AttemptFolder) -> None:
        """Write into this attempt from now on."""
        with self._lock:
            self._attempt = attempt
        self._write()

    def look(self) -> None:
        """Ask Slurm now."""
        end = self._job.end_time()
        if end is not None:
            self.end = end
        self._write()

    def _keep(self) -> None:
        while True:
            time.sleep(_DEADLINE_SECONDS)
            self.look()

    def _write(self) -> None:
        """If it is news. What cannot be written now is written after the next look."""
        with self._lock:
            if self._attempt is None or self.end is None or self._written == (self._attempt, self.end):
                return
            try:
                write_json(self._attempt.deadline, {"end": self.end}, NONE)
            except OSError as error:
                say(f"the job's end cannot be written: {error}")
            else:
                self._written = (self._attempt, self.end)


class Termination:
    """Slurm's word that it ends this step: on a cancel, a requeue, the time limit, after a preemption's grace."""

    def __init__(self) -> None:
        self.told = False
        signal.signal(signal.SIGTERM, self._note)
        # submitit takes both for itself: what they mean here is the ranks' to say.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _note(self, signum: int, frame: object) -> None:
        self.told = True


def _told(*command: str) -> str:
    """What a Slurm command prints; empty when it fails, or does not answer."""
    try:
        answer = ask(*command, seconds=_COMMAND_SECONDS)
    except UserError:
        return ""
    return "" if answer.code else answer.out


def job_name() -> str:
    """This job as commands take it, an element of an array as 7_3; empty outside of a job."""
    array, element = os.environ.get(env.SLURM_ARRAY_JOB_ID), os.environ.get(env.SLURM_ARRAY_TASK_ID)
    return f"{array}_{element}" if array and element else os.environ.get(env.SLURM_JOB_ID, "")


def host() -> str:
    """This node's name, as the other nodes find it."""
    return os.environ.get(env.SLURMD_NODENAME) or socket.gethostname()


def _succeeds(*command: str, pauses: Sequence[float] = (0.2, 1.0, 0.0)) -> bool:
    """Run it until it succeeds, with these pauses after failures; the last complaint goes to stderr."""
    complaint = ""
    for pause in pauses:
        try:
            answer = ask(*command, seconds=_COMMAND_SECONDS)
        except UserError as error:
            complaint = str(error)
        else:
            if not answer.code:
                return True
            complaint = answer.err.strip()
            if pause > _LONG_PAUSE and not _AWAY.search(complaint):
                break  # the controller has answered
        time.sleep(pause)
    say(f"{' '.join(command)}: {complaint}")
    return False
