"""Does every job that runs out of time end with a checkpoint of its last step?

python -m tests.slurm.time_limit [--runs 20] [--side-by-side 2]

Each run trains for longer than the minute that Slurm gives it, with no checkpoint due in between. What counts is the
first start: it must end by itself before the limit, and its newest checkpoint must be of the last step it took.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from tests.helpers.runs import records
from tests.slurm.chaos import config, submit
from tests.slurm.cluster import Cluster
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings


def one(cluster: Cluster, folder: Path, index: int) -> str:
    """Run out of time once; what was wrong, empty if nothing."""
    file = config(
        folder,
        1,
        slurm={"nodes": 1, "gpus_per_node": 0, "cpus_per_rank": 1, "time": 1},
        train__steps=100_000,
        checkpoint__every=100_000,
        validation__every=100_000,
        seed=index,
    )
    job_id, run = submit(cluster, file), RunFolder(folder / "run")
    wait(lambda: _verdict(run) is not None, f"the first start of job {job_id} has ended", timeout=900)
    steps, saved, verdict = _steps(run.path), attempts.saved_step(run), _verdict(run)
    cluster.run(["scancel", str(job_id)])
    assert verdict is not None
    wrong = "" if verdict.cause == "time_limit" else f"ended as {verdict.cause}: {verdict.message}"
    wrong = wrong or ("" if saved == steps else f"step {steps} was taken, step {saved} is saved")
    print(f"{index + 1:3} {verdict.cause}: {steps} steps, checkpoint of step {saved}: {wrong or 'ok'}", flush=True)
    return wrong


def _verdict(run: RunFolder) -> Verdict | None:
    folders = attempts.folders(run)
    return attempts.read_verdict(folders[0]) if folders else None


def _steps(run_dir: Path) -> int:
    """Steps of both phases; RL's record 0 is a validation only."""
    return sum(not (record["phase"] == "rl" and record["step"] == 0) for record in records(run_dir))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--side-by-side", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-time-limit-"))
    with (
        Cluster.up(Settings(nodes=options.side_by_side)) as cluster,
        ThreadPoolExecutor(options.side_by_side) as pool,
    ):
        found = list(pool.map(lambda index: one(cluster, folder / str(index), index), range(options.runs)))
    good = found.count("")
    print(f"{good} of {len(found)} jobs that ran out of time ended with a checkpoint of their last step")
    sys.exit(0 if good == len(found) else 1)


if __name__ == "__main__":
    main()
