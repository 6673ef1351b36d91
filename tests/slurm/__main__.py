"""A test cluster by hand: ``python -m tests.slurm up | enter | down | …``; README.md here has examples."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings

FAULTS = ("crash", "boot", "unplug", "plug", "kill-slurmd", "start-slurmd")
DAEMONS = ("stop-controller", "start-controller", "stop-munge", "start-munge")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__)
    top.add_argument("--folder", type=Path, default=Path("/tmp/slurm-by-hand"), help="one cluster in each folder")
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    up.add_argument("nodes", type=int, nargs="?", default=4)
    up.add_argument("--cpus", type=int, default=8, help="per node")
    up.add_argument("--gpus", type=int, default=0, help="per node, without a device behind them")
    up.add_argument("--accounting", action="store_true", help="with mariadb and slurmdbd")
    up.add_argument("--extra-conf", default="", help="lines for slurm.conf")
    commands.add_parser("down", help="stop it and remove its folder")
    enter = commands.add_parser("enter", help="run a command on login, node1, …; a shell without one")
    enter.add_argument("--user", help="alice or bob instead of root")
    enter.add_argument("node")
    enter.add_argument("words", nargs=argparse.REMAINDER, metavar="command")
    for name in FAULTS:
        commands.add_parser(name).add_argument("node")
    for name in (*DAEMONS, "logs"):
        commands.add_parser(name)
    return top


def start(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    settings = Settings(
        nodes=options.nodes,
        cpus=options.cpus,
        gpus=options.gpus,
        accounting=options.accounting,
        extra_conf=options.extra_conf,
    )
    cluster = Cluster.up(settings, folder=options.folder, keep=True)
    print(f"{options.nodes} nodes idle after {time.monotonic() - begun:.1f} s in {cluster.folder}")


def main() -> int:
    options = parser().parse_args()
    if options.command == "up":
        if options.folder.exists():
            print(f"{options.folder} exists: a cluster is up there; end it with `down`", file=sys.stderr)
            return 2
        start(options)
        return 0
    if not (options.folder / "settings.json").exists():
        print(f"no cluster in {options.folder}; start one with `up`", file=sys.stderr)
        return 2
    cluster = Cluster.attach(options.folder)
    if options.command == "enter":
        process = cluster.popen(options.words or ["bash", "-i"], node=options.node, user=options.user)
        return process.wait()
    if options.command == "logs":
        print(cluster.log_tail())
        return 0
    action = getattr(cluster, options.command.replace("-", "_"))
    action(*([options.node] if options.command in FAULTS else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
