"""The batch step's own job: its nodes, its end, its requeue. For Slurm 22.05 and later.

With --no-kill Slurm goes on with a job that loses nodes, also without the one of its batch step: nothing would be left
there to end the job before its time limit (seen on 22.05). Guards, small job steps on other nodes, requeue such a job.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhpc.config.jobs import SlurmSection
from rlhpc.core import env
from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from rlhpc.core.exits import EXIT_STORAGE
from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.heartbeat import DUMP_SIGNAL
from rlhpc.core.rank import node_name
from rlhpc.core.shown import show
from rlhpc.core.storage import NONE, StorageError, say
from rlhpc.launch.slurm.commands import AWAY, ask, output_of, time_of
from rlhpc.launch.slurm.queue import job_record, parse_scontrol

_COMMAND_SECONDS = 30.0
_DEADLINE_SECONDS = 20.0
# More than between two looks without an answer; between two confirmations of an end this near.
_PAUSE_SECONDS, _CONFIRM_SECONDS, _NEAR_SECONDS = 90.0, 3.0, 10.0
_REQUEUE = re.compile(r"\sRequeue=(\d)")  # the first counts: the command comes later
_LONG_PAUSE = 1.0
# A requeued job's processes are signalled, scontrol too: it may be killed before it has its answer, and be repeated.
_IS_PENDING = "Job is pending execution"
_AWAY_PAUSES = (0.2, 1.0, 5.0, 15.0, *[30.0] * 20, 0.0)
_LOOK_SECONDS = 30
_GUARDS = 3  # on nodes that hardly fail at once: the second, the last, and one between them
_END_SECONDS = 10.0
# Bash, because it needs no environment on the node. $1: the job; $2: seconds between two looks.
GUARD = """
trap '' USR2  # asks ranks to stop, with `rlhpc cancel --save` or before the time limit
while sleep "$2"; do
  record=$(scontrol show job -o "$1") || continue
  [[ $record =~ \\ JobState=(RUNNING|SUSPENDED)\\  ]] || exit 0
  [[ $record =~ \\ BatchHost=([^ ]+) ]] || continue
  host=${BASH_REMATCH[1]}
  [[ $record =~ \\ NodeList=([^ ]+) ]] || continue
  nodes=$(scontrol show hostnames "${BASH_REMATCH[1]}") || continue
  [[ -z $nodes || $'\\n'$nodes$'\\n' == *$'\\n'$host$'\\n'* ]] || scontrol requeue "$1"
done
"""
_KEY = "slurm.rendezvous_host"


@dataclass(frozen=True)
class BatchJob:
    """A running job, from the environment of its batch step.

    ``name``: its name for commands (7_3 for an element of an array). The last element's own number is its array's too,
    and a requeue by it would requeue every element. ``groups``: nodes of each group of a heterogeneous job, or one
    group.
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
        """The job by Slurm's variables. Raises UserError outside of a job."""
        job_id, nodes = os.environ.get(env.SLURM_JOB_ID), os.environ.get(env.SLURM_JOB_NODELIST)
        if not job_id or not nodes:
            raise UserError("not in a Slurm job", where=env.SLURM_JOB_ID, remedy="start it with sbatch or rlhpc submit")
        others = range(1, int(os.environ.get(env.SLURM_HET_SIZE, "1")))
        groups = [nodes, *(os.environ[env.of_het_group(env.SLURM_JOB_NODELIST, group)] for group in others)]
        names = [tuple(_output("scontrol", "show", "hostnames", group).split()) for group in groups]
        assert all(names), f"scontrol show hostnames does not know {groups}"
        return cls(job_id, job_name(), _restart_count(job_id), tuple(names))

    def end_time(self) -> float | None:
        """Unix time at which Slurm ends the job; None without a time limit or an answer.

        Just after a requeue, Slurm may still report the previous end, which is past.
        """
        lines = _output("squeue", "-h", "-j", self.name, "-o", "%e").split()  # a line for each group
        end = min((found for text in lines if (found := time_of(text)) is not None), default=0.0)
        return end if end > time.time() else None

    def partition_nodes(self) -> tuple[str, ...]:
        """Nodes of the job's partition in any state; none if Slurm does not answer."""
        partition = os.environ.get(env.SLURM_JOB_PARTITION, "")
        return tuple(_output("sinfo", "-h", "-N", "-p", partition, "-o", "%N").split()) if partition else ()

    def signal_ranks(self) -> None:
        """Sends every rank the signal at which it writes its stacks; others ignore it."""
        _succeeds("scancel", f"--signal={int(DUMP_SIGNAL)}", self.job_id)

    def ask_ranks_to_stop(self) -> None:
        """Asks every rank to save after the present step and to end."""
        _succeeds("scancel", "--signal=USR2", self.name)

    def end_ranks(self, name: str = "") -> None:
        """Ends the steps of ranks without their srun, or those of this name."""
        found = [line.split() for line in _output("squeue", "-h", "-s", "-j", self.name, "-o", "%i %j").splitlines()]
        steps = [step for step, *rest in found if not name or rest == [name]]
        if ranks := [step for step in steps if step.rpartition(".")[2].isdecimal()]:  # not 7.batch, 7.extern
            _succeeds("scancel", *ranks)

    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that Slurm has taken out of the job since its start; none if it does not answer."""
        lists = _output("squeue", "-h", "-j", self.name, "-o", "%N").split()
        left = {node for nodes in lists for node in _output("scontrol", "show", "hostnames", nodes).split()}
        return tuple(node for node in self.nodes if node not in left) if left else ()

    def may_requeue(self) -> bool:
        """True if Slurm requeues the job on request: not with --no-requeue, or by default on a site with JobRequeue=0.
        Also true if it does not answer."""
        found = _REQUEUE.search(own_record(self.job_id))
        return found is None or found[1] != "0"

    def requeue(self, excluded: Sequence[str]) -> bool:
        """Requeues this job without the ``excluded`` nodes and returns whether it worked; Slurm then ends this step.

        Waits for an unreachable controller: the run would otherwise end here.
        """
        if not _succeeds("scontrol", "requeue", self.name, pauses=_AWAY_PAUSES, done=_IS_PENDING):
            return False
        if excluded:  # only a pending job can be changed; this step lives on for Slurm's KillWait
            _succeeds("scontrol", "update", f"JobId={self.name}", f"ExcNodeList={','.join(excluded)}")
        return True


class Deadline:
    """Keeps the job's end, which an administrator may change, up to date in the attempt's folder for rank 0."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._attempt: AttemptFolder | None = None
        self._written: tuple[AttemptFolder, float] | None = None
        self._lock = threading.Lock()
        self.end: float | None = None
        self._looked = 0.0
        self.look()
        threading.Thread(target=self._keep, name="deadline", daemon=True).start()

    def seconds_left(self) -> float:
        """Seconds until the end; infinite without a limit.

        Slurm moves the end of a job that was suspended, this process with it. An end that is near or past is therefore
        confirmed, and any end after a pause.
        """
        since = time.monotonic() - self._looked
        if since > _PAUSE_SECONDS or (self._left() < _NEAR_SECONDS and since > _CONFIRM_SECONDS):
            self.look()
        return self._left()

    def _left(self) -> float:
        return float("inf") if self.end is None else self.end - time.time()

    def follow(self, attempt: AttemptFolder) -> None:
        """Writes into the folder of this attempt from now on."""
        with self._lock:
            self._attempt = attempt
        self._write()

    def look(self) -> None:
        """Asks Slurm now."""
        end = self._job.end_time()
        if end is not None:
            self.end = end
        self._looked = time.monotonic()
        self._write()

    def _keep(self) -> None:
        while True:
            time.sleep(_DEADLINE_SECONDS)
            self.look()

    def _write(self) -> None:
        """Writes a new end. If that fails, it is written after the next look."""
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
    """Slurm's SIGTERM, which ends this step on a cancel, a requeue, the time limit, or after a preemption's grace."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._note)
        # submitit handles both; here they are for the ranks.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _note(self, signum: int, frame: object) -> None:
        self.requested = True


def batch_step(run: Callable[[Termination], int], without_storage: str = "") -> int:
    """Runs a batch step and returns its exit code, or exits with it. ``without_storage``: end of the line on a run
    folder that cannot be used."""
    os.umask(0o077)
    termination = Termination()
    try:
        code = run(termination)
    except UserError as error:
        show(f"rlhpc: {error}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except StorageError as error:
        say(f"{error}{without_storage}")
        code = EXIT_STORAGE
    if code:  # submitit takes any return value for success
        sys.exit(code)
    return code


def log(text: str) -> None:
    """Prints a line with the time."""
    show(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rlhpc: {text}")


def _output(*command: str) -> str:
    return output_of(*command, seconds=_COMMAND_SECONDS)


def own_record(job_id: str, seconds: float = _COMMAND_SECONDS) -> str:
    """The job's line of ``scontrol show job -o``; empty if Slurm does not answer."""
    return job_record(output_of("scontrol", "show", "job", "-o", job_id, seconds=seconds), job_id)


def _restart_count(job_id: str) -> int:
    """Number of requeues of the job before this start. Slurm sets the variable only after a requeue: in a job that was
    submitted from a requeued one it may be that job's."""
    count = int(os.environ.get(env.SLURM_RESTART_COUNT, "0"))
    known = parse_scontrol(own_record(job_id)) if count else {}
    return min([count, *(status.restarts for status in known.values() if status.restarts is not None)])


def job_name() -> str:
    """Name of this job for commands, 7_3 for an element of an array; empty outside of a job."""
    array, element = os.environ.get(env.SLURM_ARRAY_JOB_ID), os.environ.get(env.SLURM_ARRAY_TASK_ID)
    return f"{array}_{element}" if array and element else os.environ.get(env.SLURM_JOB_ID, "")


def _succeeds(*command: str, pauses: Sequence[float] = (0.2, 1.0, 0.0), done: str | None = None) -> bool:
    """Runs a command until it succeeds or fails with ``done``, with these pauses after failures; the last error goes to
    stderr."""
    message = ""
    for pause in pauses:
        try:
            answer = ask(*command, seconds=_COMMAND_SECONDS)
        except UserError as error:
            message = str(error)
        else:
            message = answer.err.strip()
            if not answer.code or (done is not None and done in message):
                return True
            if pause > _LONG_PAUSE and not AWAY.search(message):
                break  # the controller has answered
        time.sleep(pause)
    say(f"{' '.join(command)}: {message}")
    return False


class JobGuards:
    """Guards of a job, from its start to its end."""

    def __init__(self, job: BatchJob, seconds: int = _LOOK_SECONDS) -> None:
        commands = [guard_command(job.name, node, seconds) for node in guard_nodes(job.nodes)]
        # The output of srun at their end would look like an error of the job.
        self._steps = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]

    def end(self) -> None:
        """Ends the guards."""
        for step in self._steps:
            step.terminate()
        for step in self._steps:
            try:
                step.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # its node does not answer
                step.kill()
                step.wait()


def guard_nodes(nodes: Sequence[str]) -> list[str]:
    """Nodes that have a guard; none in a job of one node, which Slurm requeues itself."""
    others = nodes[1:]
    places = {round(number * (len(others) - 1) / (_GUARDS - 1)) for number in range(_GUARDS)} if others else set()
    return [others[place] for place in sorted(places)]


def guard_command(job: str, node: str, seconds: int) -> list[str]:
    """The command of a guard on a node."""
    return [
        *("srun", "--job-name=guard", "--nodes=1", f"--nodelist={node}", "--ntasks=1", "--overlap", "--input=none"),
        *("--mpi=none", "--gres=none", "--quiet"),
        *("bash", "-c", GUARD, "guard", job, str(seconds)),
    ]


def rendezvous_host(slurm: SlurmSection) -> str:
    """Host name of this node for the ranks. Raises UserError if slurm.rendezvous_host does not lead to this node."""
    node = node_name()
    if slurm.rendezvous_host is None:
        return node
    host = slurm.rendezvous_host.replace("{node}", node)
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise UserError(
            f"node {node} knows no address of {host!r} ({error.strerror})",
            where=_KEY,
            remedy="write the name as in the nodes' /etc/hosts or DNS, {node} in place of the node's name",
        ) from None
    if not any(map(_is_own, found)):
        raise UserError(
            f"{host!r} is {', '.join(sorted(found))}, which is no address of the job's first node {node}",
            where=_KEY,
            remedy="write {node} in place of the node's name, or leave the key out",
        )
    return host


def _is_own(address: str) -> bool:
    """True if this machine has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
