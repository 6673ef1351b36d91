"""Requeues a job that has lost its first node.

With --no-kill Slurm goes on with a job that loses nodes, also without the one of its batch step: nothing would be left
there to end the job before its time limit (seen on 22.05). Small job steps on other nodes therefore watch for that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from rlhpc.launch.supervise.batch_job import BatchJob

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


class JobGuards:
    """The guards of a job, from its start to its end."""

    def __init__(self, job: BatchJob, seconds: int = _LOOK_SECONDS) -> None:
        commands = [guard_command(job.name, node, seconds) for node in guard_nodes(job.nodes)]
        # What srun says at their end would look like an error of the job.
        self._steps = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]

    def end(self) -> None:
        """Ends them."""
        for step in self._steps:
            step.terminate()
        for step in self._steps:
            try:
                step.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # its node does not answer
                step.kill()
                step.wait()


def guard_nodes(nodes: Sequence[str]) -> list[str]:
    """The nodes that have a guard; none in a job of one node, which Slurm requeues itself."""
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
