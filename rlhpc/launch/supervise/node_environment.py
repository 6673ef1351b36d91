"""Brings the Python environment of the ranks, an archive, to each node's own disk.

Each rank that starts opens ten thousand files of its environment. From a shared file system, a thousand ranks open
millions there; from an archive that sbcast sends through Slurm's network, the job opens one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError
from rlhpc.core.exits import ExitRecord
from rlhpc.core.shown import show
from rlhpc.core.storage import patiently
from rlhpc.launch.slurm.commands import ask, output_of
from rlhpc.launch.supervise.batch_job import BatchJob
from rlhpc.launch.supervise.diagnosis import Evidence
from rlhpc.plan.checks.slurm import KEY, archive_kind

_SCRIPT = Path(__file__).with_suffix(".sh")
# sbcast: error: REQUEST_FILE_BCAST(node2): No such file or directory
_REFUSED = re.compile(r"REQUEST_FILE_BCAST\(([\w.-]+)\): (.+)")
_POLL_SECONDS = 0.2
_END_SECONDS, _REMOVE_SECONDS = 10.0, 300.0
_SEND_SECONDS = 3600.0
_LONGEST_FOLDER = 60  # as of TMPDIR: beyond, unix sockets in it have no room


class NotPlaced(Exception):
    """A node has no environment. ``nodes``: failure by node; without any, ``output`` of srun or sbcast. ``place``:
    where other nodes may have it, or the archive."""

    place: EnvironmentPlace | None = None

    def __init__(self, nodes: dict[str, str], output: str = "") -> None:
        super().__init__(output or str(nodes))
        self.nodes, self.output = nodes, output

    def evidence(self, attempt: Attempt, per_node: int) -> Evidence:
        """Evidence as the first rank of each such node would leave it, which has ``per_node`` ranks. The user has to
        fix a failure on all nodes."""
        kind = "UserError" if set(self.nodes) == set(attempt.nodes) else "NodeError"
        ends = {}
        for node, message in self.nodes.items():
            rank = attempt.nodes.index(node) * per_node
            # A node's own disk: the cause disk_full is that of the run folder.
            text = f"{KEY}: node {node}: {message.replace('No space left on device', 'its disk is full')}"
            ends[rank] = ExitRecord(rank, node, 0, time.time(), "user", kind, text)
        return Evidence(len(attempt.nodes) * per_node, attempt.nodes, ends, self.output, 1, time.time())


@dataclass(frozen=True)
class EnvironmentPlace:
    """Place of the environment of an archive on each node."""

    archive: Path
    kind: str
    size: int
    job_folder: str
    folder: str

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return f"{self.folder}/bin/python"

    def path(self, inherited: str) -> str:
        """PATH of the ranks: programs of the environment first."""
        return f"{self.folder}/bin{os.pathsep}{inherited}"

    @property
    def copy(self) -> str:
        """Path of the archive itself."""
        return f"{self.folder}.archive"


def environment_place(archive: Path, job_id: str, tmpdir: str) -> EnvironmentPlace:
    """Place for an archive: in a private folder of the job in ``tmpdir``, or in /tmp. A changed archive has another
    place. Raises UserError without the archive."""
    kind = archive_kind(archive)
    try:
        found = patiently(archive.stat, archive)
    except FileNotFoundError:
        raise UserError(f"no such file {str(archive)!r}", where=KEY, remedy="use a file that all nodes see") from None
    name = f"rlhpc-{os.getuid()}-{job_id}"
    top = tmpdir if tmpdir and len(f"{tmpdir}/{name}") <= _LONGEST_FOLDER else "/tmp"
    identity = f"{archive}:{found.st_size}:{found.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(identity)).hexdigest()[:8]
    return EnvironmentPlace(archive, kind, found.st_size, f"{top}/{name}", f"{top}/{name}/env-{digest}")


@contextlib.contextmanager
def environment_on_nodes(
    config: RunConfig, attempt: Attempt, job: BatchJob, is_ending: Callable[[], bool]
) -> Iterator[EnvironmentPlace | None]:
    """Context in which the environment of the ranks is on each node; None without an archive. Raises NotPlaced."""
    archive = config.slurm.environment_archive
    if archive is None:
        yield None
        return
    if len(job.groups) > 1:
        raise UserError("is not used in heterogeneous jobs", where=KEY, remedy="leave it out")
    place = environment_place(archive, job.job_id, os.environ.get(env.TMPDIR, ""))
    with placed(place, attempt.nodes, job.job_id, is_ending):
        yield place


@contextlib.contextmanager
def placed(place: EnvironmentPlace, nodes: Sequence[str], job_id: str, is_ending: Callable[[], bool]) -> Iterator[None]:
    """Context in which the environment is on every node. Nodes that have it from an earlier attempt keep it; a mounted
    one is unmounted at the end. Raises NotPlaced."""
    words = (place.job_folder, place.folder, place.copy, place.kind, str(place.size // 1024 + 1))
    step = subprocess.Popen(
        [*_srun(nodes), "bash", "-c", _SCRIPT.read_text(encoding="utf-8"), "bash", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        assert step.stdout is not None
        assert step.stderr is not None
        states, printed = _NodeStates(step.stdout), list[str]()
        threading.Thread(target=printed.extend, args=(step.stderr,), daemon=True).start()
        _until(lambda: states.by(nodes), step, printed, is_ending)
        states.check(nodes)
        if any(states.state(node) == "waits" for node in nodes):
            _send(place, f"{job_id}.{states.detail(nodes[0])}")
            _until(lambda: states.by(nodes, without="waits"), step, printed, is_ending)
        states.check(nodes)
        mounted = [node for node in nodes if states.state(node) == "mounted"]
        state = "mounted" if len(mounted) == len(nodes) else "unpacked"
        state += f", and mounted on {', '.join(mounted)}," if 0 < len(mounted) < len(nodes) else ""
        show(f"rlhpc: the environment is {state} on each node at {place.folder}")
        yield
    except NotPlaced as error:
        error.place = place
        raise
    finally:
        _end(step)


def remove_from_nodes(place: EnvironmentPlace, nodes: Sequence[str]) -> None:
    """Removes the environment from all nodes that can be reached."""
    code = 'rm -rf "$2" "$2".*; rmdir "$1"'
    output_of(*_srun(nodes), "bash", "-c", code, "bash", place.job_folder, place.folder, seconds=_REMOVE_SECONDS)


def _srun(nodes: Sequence[str]) -> list[str]:
    """One task on each node, beside the ranks. ``--wait=0``: those that have mounted it go on when others are done."""
    count = len(nodes)
    options = ["--export=ALL", "--overlap", "--mpi=none", "--unbuffered", "--wait=0"]
    return ["srun", f"--nodes={count}", f"--nodelist={','.join(nodes)}", f"--ntasks={count}", "--ntasks-per-node=1",
            "--cpus-per-task=1", *options]  # fmt: skip


def _send(place: EnvironmentPlace, step: str) -> None:
    """Sends the archive to the nodes of a step, and then an empty file as the sign that it is whole. Raises
    NotPlaced."""
    with tempfile.NamedTemporaryFile(prefix="rlhpc-") as empty:
        for source, target in ((str(place.archive), place.copy), (empty.name, f"{place.copy}.whole")):
            answer = ask("sbcast", "--force", f"--jobid={step}", source, target, seconds=_SEND_SECONDS)
            if answer.code:
                raise NotPlaced(dict(_REFUSED.findall(answer.err)), answer.err)


def _until(
    done: Callable[[], bool], step: subprocess.Popen[str], printed: list[str], is_ending: Callable[[], bool]
) -> None:
    """Waits until ``done``. Raises NotPlaced if the step or the job ends first."""
    while not done():
        if step.poll() is not None or is_ending():
            time.sleep(_POLL_SECONDS)  # for the last lines
            if done():
                return
            raise NotPlaced({}, "".join(printed) or "srun ended before each node had its environment")
        time.sleep(_POLL_SECONDS)


def _end(step: subprocess.Popen[str]) -> None:
    """Ends the step's standard input, and then the step if it has not ended."""
    assert step.stdin is not None
    with contextlib.suppress(OSError):
        step.stdin.close()
    for end in (step.terminate, step.kill, lambda: None):
        try:
            step.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            end()
        else:
            return


class _NodeStates:
    """Last state of each node, from the lines of a step: NODE, state and detail."""

    def __init__(self, lines: IO[str]) -> None:
        self._last: dict[str, tuple[str, str]] = {}
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def state(self, node: str) -> str:
        return self._last.get(node, ("", ""))[0]

    def detail(self, node: str) -> str:
        return self._last.get(node, ("", ""))[1]

    def check(self, nodes: Sequence[str]) -> None:
        """Raises NotPlaced if a node has failed."""
        if failed := {node: self.detail(node) for node in nodes if self.state(node) == "failed"}:
            raise NotPlaced(failed)

    def by(self, nodes: Sequence[str], without: str = "") -> bool:
        """True if each node has a state other than ``without``."""
        return all(self.state(node) not in ("", without) for node in nodes)

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            node, _, rest = line.rstrip("\n").partition("\t")
            state, _, detail = rest.partition("\t")
            self._last[node] = (state, detail)
