"""Whole runs beside a program that connects to each of their ports at once and poses as every rank.

``python -m tests.helpers.beside_a_stranger [--runs N]`` compares runs of 2 and of 8 ranks with undisturbed ones and
prints a table. It needs root, which makes a network for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.core.records import repeatable
from tests.helpers import stranger, warm
from tests.helpers.runs import finish, records, start, write_config

_MET = re.compile(r"rlhpc: ([\d,]+) connections? to \S+ that no rank of this job opened")
_PLACES = re.compile(r"places of ranks that were taken: (\d+)")


@dataclass(frozen=True)
class Beside:
    """A run and what the stranger had of it. ``ran``: whether its pickle was read; ``read``: bytes of messages."""

    exit_code: int
    output: str
    records: list[dict[str, Any]]
    seconds: float
    ports: int
    connections: int
    read: int
    ran: bool
    met: int
    places: int


@contextlib.contextmanager
def network(file: Path, *, attacked: bool) -> Iterator[subprocess.Popen[str]]:
    """A stranger in a network of its own; it does nothing unless ``attacked``."""
    options = ["--net"] if attacked else ["--net", "--idle"]
    command = [warm.INTERPRETER, stranger.__file__, str(file), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.stdin.close()


def run_beside(folder: Path, ranks: int, *, attacked: bool) -> Beside:
    """A small run on ``ranks`` ranks of this machine."""
    changes = {"resources__ranks_per_node": ranks, "train__steps": 2, "actor__parallel__tp": 2, "rollout__tp": 2}
    config, file, started = write_config(folder, **changes), folder / "ran", time.monotonic()
    with network(file, attacked=attacked) as process:
        code, output = finish(start(config, environ={stranger.NETWORK: str(process.pid)}))
        seconds = time.monotonic() - started
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        report = json.loads(process.stdout.read())
    run = folder / "run"
    said = output + "".join(log.read_text(errors="replace") for log in sorted(run.glob("attempts/*/logs/*")))
    met, places = (sum(int(n.replace(",", "")) for n in kind.findall(said)) for kind in (_MET, _PLACES))
    return Beside(code, said, records(run), seconds, **report, ran=file.exists(), met=met, places=places)


def what_matters(found: Beside) -> list[dict[str, Any]]:
    """All numbers of a run that are not times."""
    return [repeatable(record) for record in found.records]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10, help="for each number of ranks")
    runs = parser.parse_args().runs
    sys.executable = str(warm.python())
    worst = 0
    columns = "ranks, run, ended, bit-equal, ports, connections, met, places taken, bytes read, code ran, seconds"
    print("|", columns.replace(", ", " | "), "|\n|" + " --- |" * (1 + columns.count(",")))
    for ranks in (2, 8):
        expected = None
        for number in range(runs + 1):
            with tempfile.TemporaryDirectory(prefix="beside-") as name:
                found = run_beside(Path(name), ranks, attacked=number > 0)
            expected = expected or what_matters(found)
            equal = what_matters(found) == expected
            good = found.exit_code == 0 and equal and not found.read and not found.ran
            worst = max(worst, not good)
            print(
                f"| {ranks} | {number or 'alone'} | {found.exit_code} | {'yes' if equal else 'NO'} | {found.ports}"
                f" | {found.connections:,} | {found.met:,} | {found.places} | {found.read}"
                f" | {'YES' if found.ran else 'no'} | {found.seconds:.0f} |",
                flush=True,
            )
            if not good:
                print(found.output[-3000:], file=sys.stderr)
    sys.exit(worst)


if __name__ == "__main__":
    main()
