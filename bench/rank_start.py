"""Opens and stats of a rank's start on the shared file system, without and with slurm.environment_archive.

python -m bench.rank_start [--archive FILE] [--keep]

As root: a test cluster (tests/slurm), strace and zstd. A job of one rank trains a small model for a step, first with
this Python, then with the archive, which is packed before: the Python below this virtual environment, its packages and
rlhpc. strace counts the calls of the rank and its children. The shared file system is everything but the system's own
folders, /proc, /sys, /dev and /tmp, the node's own disk. The run folder, models and data are below build/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

from rlhpc.data.arithmetic import make
from tests.helpers.runs import ROOT, write_config
from tests.slurm.chaos import submit
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

OPENS = ("open", "openat", "openat2")
STATS = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2")
TODAY, LIMIT = {"opens": 15_053, "stats": 101_000}, 0.05  # as measured in November 2026, before heartbeats by the store
_SYSTEM = ("usr", "lib", "lib64", "bin", "sbin", "etc", "proc", "sys", "dev", "run", "var", "tmp")
_CALL = re.compile(r'^\d+ +(\w+)\((?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"([^"]*)"')
FOLDER, PLACE = ROOT / "build" / "rank_start", Path("/tmp/rank-start")
TRACE = FOLDER / "rank.trace"


def pack(archive: Path) -> None:
    """Packs the Python of this virtual environment, its packages and rlhpc, by links to their files."""
    environment = archive.with_name("environment")
    shutil.rmtree(environment, ignore_errors=True)
    packages = Path(sysconfig.get_path("purelib"))
    inside = environment / packages.relative_to(sys.prefix)
    subprocess.run(["cp", "-al", sys.base_prefix, environment], check=True)
    subprocess.run(["cp", "-alT", "--remove-destination", packages, inside], check=True)
    for file in inside.glob("__editable__*"):
        file.unlink()
    shutil.copytree(ROOT / "rlhpc", inside / "rlhpc", ignore=shutil.ignore_patterns("__pycache__"))
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "compileall", "-q", inside / "rlhpc"], check=True)
    command = f"tar -C {environment} --exclude=./lib/python3*/test -cf - . | zstd -q -f -1 -T0 -o {archive}"
    subprocess.run(command, shell=True, check=True)
    shutil.rmtree(environment)


def batch_step(run_dir: str) -> int:
    """Batch step with the real supervisor, which starts its rank under strace and with its own Python path."""
    from rlhpc.launch.supervise import step_ranks, supervisor

    command = step_ranks.srun_command
    calls = ",".join((*OPENS, *STATS))

    def traced(*arguments: object, **known: object) -> list[str]:
        words = command(*arguments, **known)  # type: ignore[arg-type]
        python = next(place for place, word in enumerate(words) if word.endswith("/python"))
        clean = ["env", "-u", "PYTHONPATH"] if words[python] != sys.executable else []
        return [
            *words[:python],
            *clean,
            *f"strace -f -y -qq --seccomp-bpf -e trace={calls} -o {TRACE}".split(),
            *words[python:],
        ]

    step_ranks.srun_command = traced  # type: ignore[assignment]
    return supervisor.run_job(run_dir)


def start(cluster: Cluster, name: str, slurm: dict[str, object]) -> Counter[tuple[str, str]]:
    """Calls of a rank by kind and path."""
    folder = FOLDER / name
    make(str(folder / "inputs"))
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(PLACE)}
    file = write_config(
        folder,
        slurm={"nodes": 1, "gpus_per_node": 0, "cpus_per_rank": 1, "environment": environment, **slurm},
        prepare=None,
        sft__steps=1,
        train__steps=1,
    )
    job = submit(cluster, file, None, "--entry", "bench.rank_start:batch_step")
    cluster.wait_state(job, {"COMPLETED", "FAILED"}, timeout=1800)
    found: Counter[tuple[str, str]] = Counter()
    with open(TRACE) as lines:
        for line in lines:
            if (match := _CALL.match(line)) and match[3]:
                call, place, path = match.groups()
                found["opens" if call in OPENS else "stats", os.path.normpath(os.path.join(place or "/", path))] += 1
    return found


def shared(calls: Counter[tuple[str, str]], kind: str) -> Counter[str]:
    """Calls of a kind on the shared file system, by path."""
    return Counter({path: count for (what, path), count in calls.items() if what == kind and not local(path)})


def local(path: str) -> bool:
    return path.lstrip("/").partition("/")[0] in _SYSTEM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--archive", type=Path, default=FOLDER / "env.tar.zst")
    parser.add_argument("--keep", action="store_true", help="Keep the archive, and take it if it is there.")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    PLACE.mkdir(exist_ok=True, mode=0o700)
    if not (options.keep and options.archive.exists()):
        began = time.monotonic()
        pack(options.archive)
        print(f"packed in {time.monotonic() - began:.0f} s: {options.archive.stat().st_size / 1e9:.2f} GB", flush=True)
    failed = False
    with Cluster.up(Settings(nodes=1)) as cluster:
        for name, slurm in (("without", {}), ("with", {"environment_archive": str(options.archive)})):
            calls = start(cluster, name, slurm)
            for kind, today in TODAY.items():
                total = sum(count for (what, _), count in calls.items() if what == kind)
                ours = shared(calls, kind)
                print(
                    f"{name} the archive: {total:,} {kind}, {ours.total():,} on the shared file system,"
                    f" {ours.total() / today:.1%} of {today:,}",
                    flush=True,
                )
                for folder, count in by_folder(ours).most_common(8):
                    print(f"  {count:7,} {folder}")
                failed |= name == "with" and ours.total() > LIMIT * today
    if not options.keep:
        shutil.rmtree(FOLDER)
    shutil.rmtree(PLACE)
    if failed:
        sys.exit(f"above {LIMIT:.0%}")


def by_folder(paths: Counter[str]) -> Counter[str]:
    """By the first five parts of the path."""
    found: Counter[str] = Counter()
    for path, count in paths.items():
        found["/".join(path.split("/")[:6])] += count
    return found


if __name__ == "__main__":
    main()
