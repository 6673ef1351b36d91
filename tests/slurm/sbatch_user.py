"""Someone who submits with plain sbatch on a test cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.plain_model import write_inputs
from tests.slurm.cluster import Cluster
from tests.slurm.settings import USERS

ROOT = Path(__file__).parents[2]
CPUS = ("--gpus-per-node=0", "--cpus-per-task=1")  # what sbatch gets where there are no GPUs


class SbatchUser:
    """They type ``sbatch sbatch/….sbatch`` in ``folder``, which has a small configuration. ``name``: alice or bob
    instead of root."""

    def __init__(self, cluster: Cluster, folder: Path, name: str | None = None) -> None:
        self.cluster, self.folder, self.name = cluster, folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self.config = write_inputs(folder)
        self.run = folder / "run"
        self.environ = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), cluster.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.own()

    def own(self) -> None:
        """The folder, and what the test has put into it, is this user's."""
        if self.name:
            subprocess.run(["chown", "-R", f"{USERS[self.name]}:{USERS[self.name]}", self.folder], check=True)

    def sbatch(self, *words: str | Path) -> int:
        """The name of a template stands for its file; the job's id."""
        files = [str(ROOT / "sbatch" / word) if str(word).endswith(".sbatch") else str(word) for word in words]
        return self.cluster.submit(*files, cwd=self.folder, env=self.environ, user=self.name)

    def ended(self, job: int | str, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until the job has; what Slurm says of it then, and on a failure what it printed."""
        try:
            return self.cluster.wait_state(job, state, timeout=500)
        except AssertionError as error:
            error.add_note("\n".join(f"--- {file.name}\n{file.read_text()}" for file in self.folder.glob("*.log")))
            raise

    def ranks(self, run: Path | None = None, attempt: int = 1) -> list[dict[str, Any]]:
        """What the ranks have noted, by their numbers."""
        notes = [json.loads(file.read_text()) for file in (run or self.run).glob(f"rank-{attempt}-*.json")]
        return sorted(notes, key=lambda note: note["rank"])
