"""Runs all hostile programs as a user and as root, in both isolations, and prints how many were contained.

python -m tests.rewards.hostile [--only WORD] [--settings user,namespaces …]

As root. Ends with 1 if a program escaped that docs/rewards.md promises to contain.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass, field

from tests.rewards.hostile.catalogue import CLASSES
from tests.rewards.hostile.program import REASONS, Program, Response
from tests.rewards.hostile.suite import LATE, SETTINGS, Setting, suite


@dataclass
class Counts:
    """Programs of a class in one setting."""

    contained: int = 0
    unpromised: int = 0
    escaped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.contained} / {self.unpromised} / {len(self.escaped)}"


def run(setting: Setting, only: str, *, verbose: bool = True) -> dict[str, Counts]:
    """Runs every program in a sandbox of its own; one that escapes gets new canaries for the next."""
    found = {name: Counts() for name in CLASSES}
    waiting = [(name, program) for name, programs in CLASSES.items() for program in programs]
    waiting = [(name, program) for name, program in waiting if only in f"{name}: {program.name}"]
    while waiting:
        with suite(setting, generous=True) as running:
            while waiting and not running.harmed:
                name, program = waiting.pop(0)
                if not setting.promises(program):
                    found[name].unpromised += 1
                    continue
                began = time.monotonic()
                harm = running.harm(program)
                if harm and all(line.startswith(LATE) for line in harm):  # of a busy machine
                    harm = running.harm(program)
                if verbose and time.monotonic() - began > 2:
                    print(f"[{setting}] {name}: {program.name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
                if harm:
                    found[name].escaped.append(program.name)
                    print(f"[{setting}] {name}: {program.name}: {'; '.join(harm)}", file=sys.stderr, flush=True)
                else:
                    found[name].contained += 1
    return found


def table(found: dict[Setting, dict[str, Counts]]) -> str:
    """A table of classes; each cell: contained / not promised / escaped."""
    lines = ["| class | programs | " + " | ".join(map(str, found)) + " |"]
    lines.append("| --- " * (2 + len(found)) + "|")
    for name, programs in CLASSES.items():
        cells = [str(found[setting][name]) for setting in found]
        lines.append(f"| {name} | {len(programs)} | {' | '.join(cells)} |")
    sums = []
    for counts in found.values():
        contained, unpromised = (sum(getattr(c, name) for c in counts.values()) for name in ("contained", "unpromised"))
        sums.append(str(Counts(contained, unpromised, _all_escaped(counts))))
    lines.append(f"| all | {sum(map(len, CLASSES.values()))} | {' | '.join(sums)} |")
    return "\n".join(lines)


def _all_escaped(counts: dict[str, Counts]) -> list[str]:
    return [name for count in counts.values() for name in count.escaped]


def reasons() -> dict[str, list[str]]:
    """Programs that the page does not promise to contain under ``isolation: filter``, by reason."""
    found: dict[str, list[str]] = {}
    every: list[Program | Response] = [program for programs in CLASSES.values() for program in programs]
    for program in every:
        if program.unpromised:
            found.setdefault(REASONS[program.unpromised], []).append(program.name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of CLASS: NAME")
    parser.add_argument("--settings", nargs="*", default=[str(s).replace(" ", "") for s in SETTINGS])
    given = parser.parse_args()
    if os.geteuid():
        raise SystemExit("python -m tests.rewards.hostile: run it as root, which starts programs of other users")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the canaries end too
    wanted = [setting for setting in SETTINGS if str(setting).replace(" ", "") in given.settings]
    found = {setting: run(setting, given.only) for setting in wanted}
    print(f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}\n")
    print(table(found))
    print("\nNot promised under `isolation: filter`:\n")
    for reason, names in reasons().items():
        print(f"- {reason}: {len(names)} programs")
    escaped = [name for counts in found.values() for name in _all_escaped(counts)]
    sys.exit(1 if escaped else 0)
