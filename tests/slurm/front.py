"""The command line on the login machine of a test cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.plain_model import write_inputs
from tests.helpers.waiting import PATIENCE
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]


class Front:
    """``rlhpc`` as a user types it, with a list of runs of its own. Jobs call small programs of tests.slurm.jobs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.config = write_inputs(folder)
        self.run_dir = folder / "run"
        self._environ = {"XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200", "TERM": "xterm"}

    def popen(self, *arguments: str, **popen: Any) -> subprocess.Popen:
        command = [sys.executable, "-m", "rlhpc.cli.main", *arguments]
        return self.cluster.popen(command, env=self._environ, cwd=ROOT, **popen)

    def run(
        self, *arguments: str, env: dict[str, str] | None = None, timeout: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhpc.cli.main", *arguments]
        return self.cluster.run(command, env={**self._environ, **(env or {})}, cwd=ROOT, timeout=timeout)

    def ok(self, *arguments: str) -> str:
        """What it prints; a failure fails the test."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def error_line(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """The one line of a user's error."""
        done = self.run(*arguments, env=env)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("rlhpc: warning: ")]
        assert (done.returncode, len(lines)) == (2, 1), f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return lines[0].removeprefix("rlhpc: ")

    def submit(self, program: str, *overrides: str, config: Path | None = None) -> str:
        """Submit the small run, without GPUs; the job's id."""
        words = [str(config or self.config), "--entry", f"tests.slurm.jobs:{program}", "slurm.gpus_per_node=0"]
        return self.ok("submit", *words, *overrides).split()[2].rstrip(":")

    def submission(self, *overrides: str, program: str = "sleep") -> list[str]:
        """The words of such a submission."""
        entry = f"tests.slurm.jobs:{program}"
        return ["submit", str(self.config), "--entry", entry, "slurm.gpus_per_node=0", *overrides]

    def queue(self) -> list[str]:
        """Ids of the jobs in the queue."""
        return self.cluster.run(["squeue", "-h", "-r", "-o", "%i"]).stdout.split()
