"""Time from the death of a rank to the next training step, without the configured pause.

python -m bench.slurm_recovery [--rounds 3] [--nodes 2]

After each checkpoint of a run on a test cluster (tests/slurm), SIGKILL ends one rank. Imports count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.folder import RunFolder
from tests.helpers.runs import records
from tests.slurm.chaos import config, submit
from tests.slurm.cluster import Cluster
from tests.slurm.faults import Target, kill_rank
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

_WAIT = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rlhpc-recovery-") as name,
        Cluster.up(Settings(nodes=options.nodes)) as cluster,
    ):
        file = config(Path(name), options.nodes, train__steps=100_000, recovery={"wait_seconds": _WAIT})
        job_id, run = submit(cluster, file), RunFolder(Path(name) / "run")
        target = Target(cluster, job_id, run, random.Random(0))
        print(f"{options.nodes} ranks on as many nodes: seconds after SIGKILL to a rank, minus the pause of {_WAIT} s")
        print("  diagnosed   ranks restarted   next step done")
        for round_ in range(1, options.rounds + 1):
            _wait_for_steps(run, time.time())
            wait(lambda: attempts.saved_step(run) > 0, "a checkpoint")
            killed = time.time()
            kill_rank(target)
            _wait_for_steps(run, killed)
            verdict, again = attempts.read_verdict(run.attempt(round_)), attempts.read_attempt(run.attempt(round_ + 1))
            assert verdict is not None
            assert again is not None
            step = next(r["time"] for r in records(run.path) if r["time"] > again.started)
            times = (verdict.time - killed, again.started - killed - _WAIT, step - killed - _WAIT)
            print("  {:9.1f}{:18.1f}{:17.1f}".format(*times), flush=True)
        cluster.run(["scancel", str(job_id)])


def _wait_for_steps(run: RunFolder, since: float) -> None:
    """Wait for a step more than 2 s after ``since`` and after the newest attempt began."""

    def stepped() -> bool:
        folders = attempts.folders(run)
        newest = attempts.read_attempt(folders[-1]) if folders else None
        found = records(run.path)
        return newest is not None and bool(found) and found[-1]["time"] > max(newest.started, since) + 2

    wait(stepped, "steps of the newest attempt", timeout=900)


if __name__ == "__main__":
    main()
