"""Ranks of a Slurm job that srun starts: a part is one job step, or several where it shares nodes with others."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from rlhpc.config.schema import RunConfig
from rlhpc.core import env, exits
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.core.exits import ExitRecord, read_exit, read_exits
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.shown import show
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.machine import free_port
from rlhpc.launch.supervise.diagnosis import (
    NEVER_SEEN,
    NODE_FAILURE,
    TASKS,
    Evidence,
    numbers_of,
    reports_failed_rank,
)
from rlhpc.launch.supervise.hang_watch import Hang
from rlhpc.launch.supervise.job_ranks import ENGINE_LOST, JobRanks
from rlhpc.launch.supervise.node_environment import EnvironmentPlace
from rlhpc.launch.supervise.srun import RankBlock, block_command, blocks_of, srun_command, srun_environment

_GRACE_SECONDS = 1.5  # for ranks to write their records after the first has failed
_STUCK_SECONDS = 60.0  # for srun to end after the last rank
_SRUN_SECONDS = 40.0  # for srun to end on request: more than Slurm's KillWait
_NOT_IN_JOB = re.compile(r"^srun: error: (.*Requested node configuration is not available.*)$", re.M)
_LOOK_SECONDS = 5.0  # between looks for exit records


@dataclass(frozen=True)
class StepStart:
    """Starts the ranks of an attempt by srun.

    ``groups``: nodes of each group of a heterogeneous job; ``address``: of the job's store, on the node that ranks meet
    at; ``port``: a free one there, for stores of libraries;
    ``end_step``: ends a job step of this name without its srun, or all of them without a name; ``environment``: the
    ranks' Python, default: this one; ``first_rank``: the job's number of the first rank on ``nodes``.
    """

    config: RunConfig
    attempt: AttemptFolder
    world_size: int
    nodes: tuple[str, ...]
    groups: Sequence[Sequence[str]]
    entry: str
    address: StoreAddress
    end_step: Callable[[str], object]
    environment: EnvironmentPlace | None = None
    port: int = field(default_factory=free_port)
    first_rank: int = 0

    def start(self, ranks: range, generation: int = 0) -> StepRanks:
        """Starts a part of the ranks, or all."""
        python = self.environment.python if self.environment is not None else ""
        if len(ranks) == self.world_size:
            command = srun_command(self.config, self.nodes, self.attempt, self.entry, self.groups, python)
            steps = [_Step.start(command, self._environment(None), 0, "")]
            return StepRanks(self, ranks, self.nodes[0], steps)
        if len(self.groups) > 1:
            raise UserError(
                "rejoin, but Slurm requeues a heterogeneous job that loses a node",
                where="recovery.lost_engines",
                remedy="set it to restart, or submit a job that is not heterogeneous",
            )
        per_node = self.config.resources.ranks_per_node
        blocks = blocks_of(ranks, self.nodes, per_node, generation, self.first_rank)
        steps = [
            _Step.start(
                block_command(self.config, block, self.attempt, self.entry, python),
                self._environment(block),
                block.ranks.start,
                block.name,
            )
            for block in blocks
        ]
        return StepRanks(self, ranks, blocks[0].nodes[0], steps)

    def _environment(self, block: RankBlock | None) -> dict[str, str]:
        host, store = self.address.host, (self.address.port, self.address.secret)
        found = srun_environment(self.config, self.world_size, host, store, self.port, block)
        return {**found, env.PATH: self.environment.path(found[env.PATH])} if self.environment is not None else found


@dataclass
class _Step:
    """A job step by its srun. ``first``: the job's number of its first rank."""

    srun: subprocess.Popen[str]
    first: int
    name: str
    printed: list[str]
    reader: threading.Thread

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], first: int, name: str) -> _Step:
        srun = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        assert srun.stderr is not None
        printed: list[str] = []
        reader = threading.Thread(target=copy_output, args=(srun.stderr, printed), daemon=True)
        reader.start()
        return cls(srun, first, name, printed, reader)

    @property
    def output(self) -> str:
        """Output of srun and of Slurm's daemons, with the job's numbers of ranks."""
        return with_job_ranks("".join(self.printed), self.first)


@dataclass
class StepRanks:
    """A part of a job's ranks, or all of them."""

    how: StepStart
    ranks: range
    node: str
    steps: list[_Step]
    _failed_at: float = float("inf")
    _looked: float = field(default_factory=time.monotonic)
    _done_at: float = float("inf")

    def poll(self) -> dict[int, ExitRecord]:
        """Exit records of all ranks once the part is over, none before: see ``JobPart``. srun may not have ended."""
        if not self._is_over():
            return {}
        found = {rank: read_exit(self.how.attempt.exits, rank) for rank in self.ranks}
        return {rank: record or self._silent(rank) for rank, record in found.items()}

    def end(self) -> None:
        """Ends srun, which kills the ranks at once; if it is stuck, kills both."""
        running = [step for step in self.steps if step.srun.poll() is None]
        for step in running:
            step.srun.terminate()
        deadline = time.monotonic() + _SRUN_SECONDS
        for step in running:
            try:
                step.srun.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.how.end_step(step.name)
                step.srun.kill()
                step.srun.wait()
        for step in self.steps:
            step.reader.join(timeout=5)

    @property
    def gone(self) -> str:
        """Reason why Slurm does not start the ranks on their nodes again; empty if it does."""
        if (lost := NODE_FAILURE.search(self.output)) is not None:
            return f"node {lost[1]} failed"
        if (refused := _NOT_IN_JOB.search(self.output)) is not None:
            return f"node {self.node} is not in the job any more ({refused[1]})"
        return ""

    @property
    def output(self) -> str:
        """Output of all srun processes."""
        return "".join(step.output for step in self.steps)

    @property
    def exit_code(self) -> int:
        """The first of srun's exit codes that is not 0; 0 without one."""
        return next((code for step in self.steps if (code := step.srun.poll())), 0)

    def unrecorded(self) -> dict[int, ExitRecord]:
        """None: the diagnosis reads srun's output."""
        return {}

    def _is_over(self) -> bool:
        """True if srun has ended, or should have. It terminates other ranks than the failed one, and kills them only
        after Slurm's KillWait."""
        if self._failed_at == float("inf") and reports_failed_rank(self.output):
            self._failed_at = time.monotonic()
        if time.monotonic() - self._failed_at > _GRACE_SECONDS or self._done_seconds() > _STUCK_SECONDS:
            return True
        codes = [step.srun.poll() for step in self.steps]
        if any(codes) and len(codes) > 1 and self._failed_at == float("inf"):
            self._failed_at = time.monotonic()
        return None not in codes

    def _done_seconds(self) -> float:
        """Seconds since all ranks were seen to be done while srun runs."""
        now = time.monotonic()
        if self._done_at == float("inf") and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if exits.all_ended(self.how.attempt.exits, self.ranks):
                self._done_at = now
        return max(0.0, now - self._done_at)

    def _silent(self, rank: int) -> ExitRecord:
        """Record for a rank that left none."""
        found = [match for match in TASKS.finditer(self.output) if rank in numbers_of(match[2])]
        errors = [line for line in self.output.splitlines() if line.startswith("srun: error: ")]
        node, message = (found[0][1], found[0][3]) if found else (self.node, (errors or [NEVER_SEEN])[0])
        return ExitRecord(rank, node, 0, time.time(), "signal", message=message)


def evidence_of(
    ranks: JobRanks,
    attempt: Attempt,
    ended: Mapping[int, ExitRecord],
    hang: Hang | None,
) -> Evidence:
    """Evidence on ranks that have ended. ``ended``: result of their last poll."""
    parts = ranks.groups if all(record.type != ENGINE_LOST for record in ended.values()) else ranks.parts
    known = {rank: record for rank, record in ended.items() if record.kind != "signal"}
    mine = set(ranks.ranks)
    known |= {rank: record for rank, record in read_exits(ranks.how.attempt.exits).items() if rank in mine}
    for part in ranks.running_parts:
        known = {**part.unrecorded(), **known}
    output, code = "".join(part.output for part in parts), next((part.exit_code for part in parts if part.exit_code), 0)
    return Evidence(len(mine), attempt.nodes, known, output, code, time.time(), hang)


def with_job_ranks(output: str, first: int) -> str:
    """srun's output with the job's numbers of ranks in the place of its own: the step's first rank has 0."""
    if not first:
        return output
    return _RANKS.sub(lambda at: f"{at[1]}{','.join(str(first + n) for n in numbers_of(at[2]))}{at[3]}", output)


_RANKS = re.compile(r"^(srun: error: (?:[\w.-]+: )?tasks? )([\d,-]+)(:| launch failed)", re.M)


def copy_output(source: IO[str], printed: list[str]) -> None:
    """Copies srun's output to our own log and to ``printed``."""
    for line in source:
        printed.append(line)
        show(line, end="", file=sys.stderr)
