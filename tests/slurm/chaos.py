"""Runs of the demo's task on a real Slurm, each hit by a fault at a random moment, none helped by a person.

python -m tests.slurm.chaos [--runs 20] [--seed 0] [--faults kill_rank,unplug] [--side-by-side 2] [--placement separate]

Each run must finish, take every step once, give up no step that a checkpoint held, and end with the weights of an
undisturbed run on as many ranks, bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core import attempts
from rlhpc.core.attempts import Verdict
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import repeatable
from tests.helpers.runs import ROOT, records, write_config
from tests.slurm.cluster import Cluster
from tests.slurm.faults import FAULTS, Fault, Target, small_disk
from tests.slurm.faulty_disk import FaultyDisk
from tests.slurm.scontrol import wait
from tests.slurm.settings import Settings

SFT_STEPS, RL_STEPS, EVERY = 10, 30, 5
NODES = (2, 3, 4)
_DISK_MIB = 192
# With placement separate, half of a node's ranks train or generate beside those of the other nodes.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "colocated": {},
    "separate": {
        "placement": "separate",
        "resources": {"ranks_per_node": 2},
        "rollout__ranks": 1,
        "asynchrony": {"max_staleness": 1},
    },
}


@dataclass(frozen=True)
class Outcome:
    """What became of one run; ``wrong`` is empty when all is as it should be."""

    fault: str
    nodes: int
    moment: str
    seconds: float
    starts: int
    causes: tuple[str, ...]
    recovery: float
    wrong: str = ""


def config(folder: Path, nodes: int, **changes: Any) -> Path:
    """The demo's task, short, with a checkpoint every few steps."""
    return write_config(
        folder,
        **{
            "slurm": {"nodes": nodes, "gpus_per_node": 0, "cpus_per_rank": 1, "time": 20},
            "recovery": {"wait_seconds": 3, "hang_timeout_seconds": 120},
            "sft__steps": SFT_STEPS,
            "train__steps": RL_STEPS,
            "train__prompts_per_step": 32,
            "train__minibatches": 2,
            "checkpoint__every": EVERY,
            "validation__every": 10,
            **changes,
        },
    )


def submit(cluster: Cluster, file: Path, more: Mapping[str, str] | None = None, *words: str) -> int:
    """`rlhpc submit`, as a user does; the job's id."""
    environ = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(file.parent / "state"), **(more or {})}
    command = [sys.executable, "-m", "rlhpc.cli.main", "submit", str(file), *words]
    cluster.run(command, env=environ, check=True)
    return int(json.loads((file.parent / "run" / "job.json").read_text())["job_id"])


def undisturbed(cluster: Cluster, folder: Path, nodes: int, **changes: Any) -> Path:
    """A run that nothing happens to; its run folder."""
    job_id = submit(cluster, config(folder, nodes, **changes))
    cluster.wait_state(job_id, "COMPLETED", timeout=900)
    return folder / "run"


def disturbed(
    cluster: Cluster,
    folder: Path,
    reference: Path,
    nodes: int,
    fault: str,
    chance: random.Random,
    disk: FaultyDisk | None = None,
    **changes: Any,
) -> Outcome:
    """A run that is hit by ``fault`` at a random moment, and how it came out."""
    began = time.monotonic()
    job_id = submit(cluster, config(folder, nodes, **changes), FAULTS[fault].environ)
    run = RunFolder(folder / "run")
    total = len(records(reference))
    count = chance.randrange(0, total - 2)
    wait(lambda: len(records(run.path)) >= count and _ranks_started(run), f"{count} records", timeout=900)
    time.sleep(chance.uniform(0.0, 1.0) if count else chance.uniform(0.0, 10.0))
    saved = attempts.saved_step(run)
    steps = len(records(run.path))
    where = FAULTS[fault].happen(Target(cluster, job_id, run, chance, disk))
    moment = f"{where + ' ' if where else ''}after {steps} of {total} steps"
    hit = time.time()
    wrong = ""
    try:
        cluster.wait_state(job_id, "COMPLETED", timeout=1200)
    except AssertionError as error:
        wrong = f"did not finish: {str(error).splitlines()[0]}"
    wrong = wrong or difference(run.path, reference) or _lost(run, saved)
    starts = [record for folder in attempts.folders(run) if (record := attempts.read_attempt(folder))]
    verdicts = [verdict for folder in attempts.folders(run) if (verdict := attempts.read_verdict(folder))]
    wrong = wrong or _unnamed(FAULTS[fault], [verdict.cause for verdict in verdicts])
    second = next((start.started for start in starts if start.started > hit), hit)
    return Outcome(
        fault, nodes, moment, time.monotonic() - began, len(starts), tuple(map(_cause, verdicts)), second - hit, wrong
    )


def _unnamed(fault: Fault, causes: Sequence[str]) -> str:
    """What no verdict names, or names without reason; the last one is of the attempt that finished.

    Slurm can requeue a job whose ranks have all finished, if it cannot reach a node of it at the end.
    """
    ended = [cause for cause in causes[:-1] if not (fault.may_pass and cause == "finished")]
    if not ended:
        return "" if fault.may_pass or not fault.names else "no attempt ended by the fault"
    if not fault.names:
        return f"an attempt ended by a fault that runs survive: {ended}"
    return "" if fault.names & set(ended) else f"verdicts {ended}, expected one of {sorted(fault.names)}"


def _cause(verdict: Verdict) -> str:
    return verdict.cause + (f": {verdict.message[:100]}" if verdict.action in ("retry", "stop") else "")


def difference(run: Path, reference: Path) -> str:
    """What reports the two runs apart: any metric but times, any byte of the last checkpoint's tensors."""
    ours, theirs = ([repeatable(record) for record in records(path)] for path in (run, reference))
    if ours != theirs:
        first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
        return f"metrics differ from record {first} on ({len(ours)} and {len(theirs)} records)"
    if weights(run) != weights(reference):
        return "final weights differ"
    return ""


def weights(run: Path) -> dict[str, str]:
    """Digests of the last checkpoint's tensor files, weights and optimizer."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = sorted((last / "actor").rglob("*.distcp"))
    assert files, f"{last} has no weights"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _lost(run: RunFolder, saved: int) -> str:
    """Every later start must begin at the checkpoint there was when the fault came, or at a newer one."""
    starts = [record for folder in attempts.folders(run) if (record := attempts.read_attempt(folder))]
    return "" if starts[-1].saved_step >= saved or len(starts) == 1 else f"step {saved} was saved and is lost"


def _ranks_started(run: RunFolder) -> bool:
    folders = attempts.folders(run)
    attempt = attempts.read_attempt(folders[-1]) if folders else None
    return attempt is not None and len(list(folders[-1].exits.glob("*.start.json"))) == attempt.world_size


def chaos(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """All runs, expected one by one as they end."""
    chance, runs, faults = random.Random(options.seed), options.runs, options.faults.split(",")
    changes = PLACEMENTS[options.placement]
    plan = [(index, chance.choice(NODES), faults[index % len(faults)], chance.random()) for index in range(runs)]
    disks = [_disk(folder / f"run-{index}", FAULTS[fault]) for index, _, fault, _ in plan]
    with Cluster.up(Settings(nodes=max(NODES))) as cluster:
        wanted = sorted({nodes for _, nodes, _, _ in plan})
        references = {nodes: undisturbed(cluster, folder / f"reference-{nodes}", nodes, **changes) for nodes in wanted}
    print(f"undisturbed runs on {wanted} nodes: done", flush=True)

    def one(item: tuple[int, int, str, float]) -> Outcome:
        index, nodes, fault, own = item
        with Cluster.up(FAULTS[fault].cluster_settings(max(NODES))) as cluster:
            where, chance = folder / f"run-{index}", random.Random(own)
            outcome = disturbed(cluster, where, references[nodes], nodes, fault, chance, disks[index], **changes)
        print(f"{index + 1:3} {_line(outcome)}", flush=True)
        return outcome

    try:
        with ThreadPoolExecutor(options.side_by_side) as pool:
            return list(pool.map(one, plan))
    finally:
        for disk in filter(None, disks):
            disk.close()
        for index in range(runs):
            subprocess.run(["umount", "-l", str(folder / f"run-{index}")], check=False)


def _disk(folder: Path, fault: Fault) -> FaultyDisk | None:
    """The small file system of a run, on a faulty one if the fault is of that kind."""
    if fault.disk:
        return FaultyDisk(folder.with_name(f"{folder.name}-files"), folder)
    small_disk(folder, _DISK_MIB)
    return None


def _line(outcome: Outcome) -> str:
    verdict = f"FAILED: {outcome.wrong}" if outcome.wrong else "ok"
    return (
        f"{outcome.fault:18} {outcome.nodes} nodes, {outcome.moment}: "
        f"{outcome.starts} starts ({', '.join(outcome.causes)}), again after {outcome.recovery:.0f} s, "
        f"{outcome.seconds:.0f} s in all: {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--placement", choices=PLACEMENTS, default="colocated")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rlhpc-chaos-"))
    outcomes = chaos(options, folder)
    good = sum(not outcome.wrong for outcome in outcomes)
    print(f"{good} of {len(outcomes)} runs finished by themselves with the weights of an undisturbed run ({folder})")
    sys.exit(0 if good == len(outcomes) else 1)


if __name__ == "__main__":
    main()
