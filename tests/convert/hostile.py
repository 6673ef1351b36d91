"""Conversions by jobs that see each other's files late, and conversions that are killed.

    python -m tests.convert.hostile                            # as root: 100 shared conversions, 300 kills
    python -m tests.convert.hostile --shared 5 --kills 10 --seed 1

Shared: four jobs with --share and then one without, each with a mount of its own whose view of the folder is 50 ms old
and whose locks do not reach the others. Half of the conversions find files of another plan; in half of them a fifth
job writes the share of another one, or all, while the shares run.
Kills: SIGKILL of a conversion's main process at a random moment, then the same conversion again, until four in a row
have been hit or one has ended. Each job is a process forked from this one. The bytes of each result must be those of an
undisturbed conversion, and ``verify`` must find no fault.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rlhpc.convert.execute import Share, convert
from rlhpc.convert.plan import plan_conversion, plan_layout
from rlhpc.convert.sides import read_side
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.late_files import late_mounts
from tests.helpers.plain_model import write_model

JOBS = 4
PIECE_BYTES, FILE_BYTES = 20_000, 60_000
LATE_SECONDS = 0.05
WAYS = ("to Megatron", "to HuggingFace")


@dataclass
class Row:
    """Counts of one line of the table; ``wrong``: what was found in the others."""

    name: str
    results: int = 0
    kills: int = 0
    equal: int = 0
    sound: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Prints it."""
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.ends.items()))
        print(f"{self.name:24} {self.results:8} {self.kills:6} {self.equal:11} {self.sound:6}  {ends}", flush=True)
        for text in self.wrong[:10]:
            print(f"    {text}")

    def add(self, target: Path, reference: Path, source: Path) -> None:
        """Compares a result with the reference, and with its source."""
        self.results += 1
        differing = _differing(target, reference)
        faults = verify(source, target, workers=1).faults if target.is_dir() else ["no result"]
        self.equal += not differing
        self.sound += not faults
        self.wrong += [*differing, *faults]


@dataclass(frozen=True)
class Case:
    """A conversion and its undisturbed result."""

    way: str
    source: Path
    reference: Path
    piece_bytes: int = PIECE_BYTES

    def run(self, target: Path, share: Share | None = None, workers: int = 1) -> None:
        """As ``rlhpc convert`` does; raises UserError."""
        side = read_side(self.source)
        kind = "megatron" if self.way == WAYS[0] else "hf"
        sizes = {"piece_bytes": self.piece_bytes, "file_bytes": FILE_BYTES}
        convert(plan_conversion(side, kind, plan_layout(side, {"tp": 2}), **sizes), target, workers, share=share)

    def start(self, target: Path, share: Share | None = None, workers: int = 1, delay: float = 0.0) -> int:
        """The same in a process of its own; its pid. It ends with 2 after a UserError, which it prints."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(delay)
            self.run(target, share, workers)
            code = 0
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def main(arguments: list[str]) -> int:
    """Prints the table; 1 if a result differs."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--shared", type=int, default=100, help="shared conversions, half of them each way")
    options.add_argument("--kills", type=int, default=300, help="kills, half of them each way")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path, help="folder for a temporary folder; default: the system's")
    asked = options.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unmounts
    chance, began, good = random.Random(asked.seed), time.monotonic(), True
    print(f"{'':24} {'results':>8} {'kills':>6} {'byte-equal':>11} {'sound':>6}  jobs by exit code", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="hostile-") as name:
        for number, case in enumerate(make_cases(Path(name))):
            for part, times in ((shared, asked.shared), (killed, asked.kills)):
                row = part(case, Path(name), (times + number) // 2, chance)
                row.show()
                good = good and row.results == row.equal == row.sound and not row.wrong
    print(f"{time.monotonic() - began:.0f} s, seed {asked.seed}")
    return not good


def make_cases(folder: Path) -> Iterator[Case]:
    """A model of 450 kB, each way, with undisturbed results."""
    source = write_model(folder / "hf", num_hidden_layers=4, vocab_size=64)
    weights = source / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    size = weights.stat().st_size - header
    numbers = np.random.default_rng(0).standard_normal(size // 4, np.float32)
    weights.write_bytes(weights.read_bytes()[:header] + numbers.tobytes())
    there, back = folder / "megatron", folder / "back"
    for case in (Case(WAYS[0], source, there), Case(WAYS[1], there, back)):
        case.run(case.reference)
        yield case


def shared(case: Case, folder: Path, times: int, chance: random.Random) -> Row:
    """Conversions by four jobs with late views."""
    row = Row(f"{JOBS} jobs {case.way}")
    disk, mounts = folder / "disk", [folder / f"view-{job}" for job in range(JOBS + 1)]
    with late_mounts(disk, mounts, LATE_SECONDS):
        for number in range(times):
            (disk / str(number)).mkdir()
            if chance.choice([False, True]):  # another plan's files are there
                _end_of(replace(case, piece_bytes=2 * PIECE_BYTES).start(disk / str(number) / "out", Share(0, 2)))
            *targets, fifth = (mount / str(number) / "out" for mount in mounts)
            jobs = [(target, Share(index, JOBS)) for index, target in enumerate(targets)]
            extra = chance.choice([[], [], [(fifth, None)], [(fifth, chance.choice(jobs)[1])]])
            spread = chance.choice([0.005, 0.03, 0.1])
            started = [case.start(*job, delay=chance.random() * spread) for job in [*jobs, *extra]]
            row.ends.update(map(_end_of, started))
            row.ends.update(["last " + _end_of(case.start(chance.choice(targets)))])
            row.add(disk / str(number) / "out", case.reference, case.source)
            row.wrong += [f"left behind: {path}" for path in (disk / str(number)).iterdir() if path.name != "out"]
            shutil.rmtree(disk / str(number))
    disk.rmdir()
    return row


def killed(case: Case, folder: Path, times: int, chance: random.Random) -> Row:
    """Conversions that are killed at random moments and then resumed."""
    row, target = Row(f"killed {case.way}"), folder / "killed" / "out"
    target.parent.mkdir()
    usual = min(_seconds(case, target) for _ in range(3))  # a slow one would let nearly all others end
    while row.kills < times:
        shutil.rmtree(target, ignore_errors=True)
        for _ in range(4):
            pid = case.start(target, workers=chance.choice([1, 1, 2]))
            time.sleep(chance.random() * usual)
            os.kill(pid, signal.SIGKILL)
            end = _end_of(pid)
            row.kills += end == "killed"
            if end == "0":
                break
        row.ends.update(["last " + _end_when_free(case, target)])
        row.add(target, case.reference, case.source)
        row.wrong += [f"left behind: {path}" for path in target.parent.iterdir() if path != target]
    shutil.rmtree(target.parent)
    return row


def _seconds(case: Case, target: Path) -> float:
    """Time of an undisturbed conversion."""
    shutil.rmtree(target, ignore_errors=True)
    began = time.monotonic()
    _end_of(case.start(target))
    return time.monotonic() - began


def _end_when_free(case: Case, target: Path) -> str:
    """Exit code of a conversion that no worker of a killed one, which ends within a second, locks out."""
    deadline = time.monotonic() + 10
    while True:
        end = _end_of(case.start(target))
        if end != "2" or time.monotonic() > deadline:
            return end
        time.sleep(0.2)


def _end_of(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "killed" if code == -signal.SIGKILL else str(code)


def _differing(target: Path, reference: Path) -> list[str]:
    names = {str(path.relative_to(folder)) for folder in (target, reference) for path in folder.rglob("*")}
    return [
        f"differs: {name}"
        for name in sorted(names)
        if not (reference / name).is_dir() and _bytes_of(target / name) != _bytes_of(reference / name)
    ]


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
