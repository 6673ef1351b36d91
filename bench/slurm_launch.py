"""Time from submission to the first collective of all ranks: rlhpc's launcher vs. a bare srun of the same ranks.

python -m bench.slurm_launch [--rounds 5] [--nodes 4]

Both submit a job on a test cluster (tests/slurm), whose ranks import torch, join, and all-reduce one number. Each rank
times its imports, which are reported separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rlhpc.core.context import RankContext
from rlhpc.data.arithmetic import make
from tests.helpers.runs import ROOT, write_config
from tests.slurm.chaos import submit
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

_BARE = """
import time; began = time.time()
import datetime, json, os, sys, torch, torch.distributed as dist
imported = time.time()
rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
dist.all_reduce(torch.ones(1))
json.dump({"began": began, "imported": imported, "met": time.time()}, open(f"{sys.argv[1]}/rank-{rank}.json", "w"))
dist.barrier()
"""


def first_collective(context: RankContext) -> None:
    """Rank program under rlhpc's launcher."""
    began = time.time()
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.groups import join

    imported = time.time()
    join(context.info)
    dist.all_reduce(torch.ones(1))
    times = {"began": began, "imported": imported, "met": time.time()}
    (context.run.path / f"rank-{context.info.rank}.json").write_text(json.dumps(times))
    dist.barrier()


def batch_step(run_dir: str) -> int:
    """Batch step that runs ``first_collective`` on every rank."""
    from rlhpc.launch.supervise.supervisor import run_job

    return run_job(run_dir, "bench.slurm_launch:first_collective")


def ours(cluster: Cluster, folder: Path, inputs: Path, nodes: int) -> tuple[float, float, float]:
    """Seconds from `rlhpc submit` to the last first collective, of the slowest rank's imports, and of `submit`."""
    file = write_config(
        folder,
        slurm={"nodes": nodes, "gpus_per_node": 0, "environment": {"PYTHONPATH": str(ROOT)}},
        prepare=None,
        model={"path": str(inputs / "model"), "dtype": "float32"},
        data={"train": [str(inputs / "train.parquet")], "max_prompt_tokens": 16},
        sft__data=[str(inputs / "sft.jsonl")],
    )
    submitted = time.time()
    submit(cluster, file, None, "--entry", "bench.slurm_launch:batch_step")
    submit_seconds = time.time() - submitted
    total, imports = _result(folder / "run", submitted, nodes)
    return total, imports, submit_seconds


def bare(cluster: Cluster, folder: Path, nodes: int) -> tuple[float, float]:
    """Seconds to the last first collective, and of imports, with only sbatch and srun."""
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(_BARE)
    lines = f"""
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) GLOO_SOCKET_IFNAME=eth0
exec srun --mpi=none --kill-on-bad-exit=1 {sys.executable} {folder}/program.py {folder}
"""
    submitted = time.time()
    cluster.submit(f"--nodes={nodes}", "--ntasks-per-node=1", script=lines, cwd=folder)
    return _result(folder, submitted, nodes)


def _result(folder: Path, submitted: float, ranks: int) -> tuple[float, float]:
    files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    deadline = time.monotonic() + 120
    while not all(file.exists() and file.read_text().endswith("}") for file in files):
        assert time.monotonic() < deadline, f"no collective in {folder}"
        time.sleep(0.05)
    times = [json.loads(file.read_text()) for file in files]
    return max(t["met"] for t in times) - submitted, max(t["imported"] - t["began"] for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="rlhpc-launch-") as name,
        Cluster.up(Settings(nodes=options.nodes)) as cluster,
    ):
        make(f"{name}/inputs")
        for round_ in range(options.rounds + 1):  # the first only warms the file cache
            plain = bare(cluster, Path(name) / f"bare-{round_}", options.nodes)
            cluster.heal()
            full = ours(cluster, Path(name) / f"ours-{round_}", Path(name, "inputs"), options.nodes)
            cluster.heal()
            rows += [(*plain, *full)] if round_ else []
    print(f"submission to first collective, {options.nodes} ranks on {options.nodes} nodes, seconds")
    print("  bare srun   its imports   rlhpc   its imports   of it `submit`   difference   beyond imports of ranks")
    for plain, plain_imports, full, imports, submitting in rows:
        beyond = (full - imports) - (plain - plain_imports)
        times = f"  {plain:9.2f}{plain_imports:14.2f}{full:8.2f}{imports:14.2f}"
        print(f"{times}{submitting:17.2f}{full - plain:13.2f}{beyond:26.2f}")
    beyond = statistics.median((f - i) - (p - q) for p, q, f, i, _ in rows)
    print(f"median beyond the ranks' imports: {beyond:.2f} s; the limit is 1 s beyond imports")


if __name__ == "__main__":
    main()
