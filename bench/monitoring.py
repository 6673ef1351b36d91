"""File opens and CPU time that monitoring 1,024 ranks costs. As root: a test cluster (tests/slurm) and strace.

python -m bench.monitoring [--ranks 64] [--seconds 60] [--clients 1024]

Opens: the real supervisor in a job on four nodes, with ranks that have their heartbeat and a client of the job's store
but no torch, and report progress five times a second. strace counts the opens of all of them, and of the programs that
the supervisor starts, while they work. Those of ranks are scaled to 1,024.

Store: as many clients, held by four processes, send heartbeats at the interval of that many ranks to a store in this
process, which also runs the hang watch. The CPU time is that of the store's thread and of the watch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rlhpc.core import heartbeat
from rlhpc.core.context import RankContext
from rlhpc.core.heartbeat import Beat, message_seconds
from rlhpc.core.process import ProcessId
from rlhpc.core.store_client import StoreAddress, StoreConnection, reach, store_address
from rlhpc.core.store_protocol import Op, number
from rlhpc.data.arithmetic import make
from rlhpc.launch.supervise.hang_watch import HangWatch, WatchedRanks
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.runs import ROOT, write_config
from tests.slurm.chaos import submit
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

RANKS, OPENS_LIMIT, CPU_LIMIT = 1024, 20.0, 0.05
_NODES, _PROCESSES, _TOUCH_SECONDS, _TIMEOUT = 4, 4, 0.2, 1800.0
_CALL = re.compile(r'^(\d+) +(?:open|openat|openat2)\((?:[^"]*, )?"([^"]*)"')


def rank(context: RankContext) -> None:
    """Rank program: progress and a connection to the store, until the job is cancelled."""
    address = store_address()
    assert address is not None
    store = reach(address, 300)
    for step in range(1 << 30):
        heartbeat.touch("rollout", step)
        if step % 25 == 0:
            store.call(Op.SET, [b"rank%d" % context.info.rank, b"%d" % step])
        time.sleep(_TOUCH_SECONDS)


def batch_step(run_dir: str) -> int:
    """Batch step that runs ``rank`` on every rank."""
    from rlhpc.launch.supervise.supervisor import run_job

    return run_job(run_dir, "bench.monitoring:rank")


def opens(ranks: int, seconds: float) -> tuple[Counter[str], Counter[str]]:
    """Opened paths of all ranks and of the launcher with what it starts, in ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="monitoring-") as name, Cluster.up(Settings(_NODES, cpus=ranks)) as cluster:
        folder = Path(name)
        make(str(folder / "inputs"))
        file = write_config(
            folder,
            slurm={"nodes": _NODES, "gpus_per_node": 0, "cpus_per_rank": 1, "environment": {"PYTHONPATH": str(ROOT)}},
            resources={"ranks_per_node": ranks // _NODES},
            prepare=None,
            train__prompts_per_step=ranks,
            sft__sequences_per_step=ranks,
            validation__max_prompts=ranks,
        )
        submit(cluster, file, None, "--entry", "bench.monitoring:batch_step")
        run = folder / "run"
        beats = run / "attempts" / "0001" / "heartbeats" / "ranks.jsonl"
        while not beats.exists() or beats.read_text().count('"rollout"') < ranks:
            time.sleep(1)
        ours = pids(rf"^\S*python\S* -u -m rlhpc.launch.worker.main {run}")
        others = pids(f"submitit.core._submit {run}") + pids(rf"^srun .*{run}")
        assert len(ours) == ranks, len(ours)
        print(f"{ranks} ranks and {len(others)} processes of the launcher", flush=True)
        return trace(ours, seconds), trace(others, seconds)


def pids(pattern: str) -> list[int]:
    """Processes of this machine by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if re.search(pattern, words) and "slurmstepd" not in words:
            found.append(int(folder.name))
    return found


def trace(processes: list[int], seconds: float) -> Counter[str]:
    """Paths that they and their children open in ``seconds``; failed opens count."""
    with tempfile.NamedTemporaryFile("r", prefix="trace-") as file:
        names = [word for pid in processes for word in ("-p", str(pid))]
        command = ["strace", "-f", "-qq", "-e", "trace=open,openat,openat2", "-o", file.name, *names]
        tracer = subprocess.Popen(command)
        time.sleep(seconds)
        tracer.terminate()
        tracer.wait()
        matches = (_CALL.match(line) for line in file)
        return Counter(match[2] for match in matches if match)


def hold(address: StoreAddress, ranks: range, every: float) -> None:
    """Connections of so many ranks, each of which sends a heartbeat in its turn."""
    connections = {rank: StoreConnection(address, timeout=60) for rank in ranks}
    due = {rank: time.monotonic() + every * (rank - ranks.start) / len(ranks) for rank in ranks}
    for count in range(1 << 30):
        for rank, connection in connections.items():
            time.sleep(max(0.0, due[rank] - time.monotonic()))
            due[rank] += every
            beat = Beat(rank, "node1", ProcessId(1, 2), 3, count + 1, "rollout", count, 0.1)
            connection.call(Op.BEAT, [number(rank), json.dumps(asdict(beat)).encode()])


def store_load(clients: int, seconds: float) -> tuple[float, float, float]:
    """Share of a core that the store takes, that of the hang watch, and messages per second."""
    every, server = message_seconds(clients, _TIMEOUT), StoreServer.open(host="127.0.0.1")
    address, share = StoreAddress("127.0.0.1", server.port, server.secret), clients // _PROCESSES
    spawn = multiprocessing.get_context("spawn")
    parts = [range(share * part, share * (part + 1)) for part in range(_PROCESSES)]
    processes = [spawn.Process(target=hold, args=(address, part, every), daemon=True) for part in parts]
    with tempfile.TemporaryDirectory() as name:
        watch = HangWatch(Path(name), WatchedRanks(clients, _TIMEOUT), server.beats)
        for process in processes:
            process.start()
        while any(not server.beats.record(rank) for rank in range(clients)):
            time.sleep(0.5)
        thread = server._thread.ident
        assert thread is not None
        clock = time.pthread_getcpuclockid(thread)
        before, own, began = time.clock_gettime(clock), time.thread_time(), time.monotonic()
        counts = messages = 0
        last = {rank: server.beats.record(rank) for rank in range(clients)}
        while time.monotonic() - began < seconds:
            time.sleep(0.2)
            assert watch.poll() is None
            counts += 1
            if counts % 5 == 0:
                now = {rank: server.beats.record(rank) for rank in range(clients)}
                messages, last = messages + sum(now[rank] is not last[rank] for rank in now), now
        passed = time.monotonic() - began
        store, own = time.clock_gettime(clock) - before, time.thread_time() - own
    for process in processes:
        process.terminate()
    server.close()
    return store / passed, own / passed, messages / passed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=RANKS)
    options = parser.parse_args()
    store, watch, rate = store_load(options.clients, options.seconds)
    print(f"store of {options.clients} clients: {store:.1%} of a core at {rate:.0f} messages/s; hang watch {watch:.1%}")
    print(f"  limit {CPU_LIMIT:.0%} of a core", flush=True)
    ranks, launcher = opens(options.ranks, options.seconds)
    by_ranks = ranks.total() / options.seconds * RANKS / options.ranks
    by_launcher = launcher.total() / options.seconds
    counted = f"{ranks.total()} by {options.ranks} in {options.seconds:g} s"
    print(f"opens/s: {RANKS} ranks {by_ranks:.2f}, scaled from {counted}")
    print(f"opens/s: launcher {by_launcher:.2f}, in the run folder {in_runs(launcher) / options.seconds:.2f}")
    print(f"  together {by_ranks + by_launcher:.2f}, limit {OPENS_LIMIT:g}")
    for path, count in (ranks + launcher).most_common(12):
        print(f"  {count:6} {path}")
    if store > CPU_LIMIT or by_ranks + by_launcher > OPENS_LIMIT:
        sys.exit("above the limit")


def in_runs(paths: Counter[str]) -> int:
    """Opens below a run folder."""
    return sum(count for path, count in paths.items() if "/monitoring-" in path)


if __name__ == "__main__":
    main()
