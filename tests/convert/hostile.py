"""Conversions that are killed, and results that are damaged.

    python -m tests.convert.hostile                            # 100 kills each way, 300 damages
    python -m tests.convert.hostile --kills 10 --damages 20 --seed 1

Kills: SIGKILL of a conversion's main process at a random moment, then the same conversion again, until four in a row
have been hit or one has ended. Each job is a process forked from this one. The bytes of each result must be those of an
undisturbed conversion, finished files keep their time of modification, ``verify`` finds no fault, and nothing is left
beside the result.
Damages: a flipped bit, a cut file, a missing file or a foreign one in a result of either kind. ``verify`` against the
source finds it, a conversion refuses it, or the folder loads equal.
"""

from __future__ import annotations

import argparse
import io
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
from dataclasses import dataclass, field
from pathlib import Path

import torch

import rlhpc.convert.torch_dist_files  # noqa: F401  # before jobs are forked
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.convert.execute import convert
from rlhpc.convert.plan import plan_conversion, plan_layout
from rlhpc.convert.sides import read_side
from rlhpc.convert.target import Partial
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, to_huggingface, write_random_model

PIECE_BYTES, FILE_BYTES = 20_000, 60_000
WAYS = ("to Megatron", "to HuggingFace")
DAMAGES = ("flipped bit", "flipped bit", "flipped bit", "cut", "missing", "foreign")  # half are flipped bits


@dataclass
class Row:
    """Counts of one line of the table; ``wrong``: what was found in the others."""

    name: str
    results: int = 0
    kills: int = 0
    kept: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Prints it."""
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.ends.items()))
        print(f"{self.name:24} {self.results:8} {self.kills:6} {self.kept:11} {len(self.wrong):6}  {ends}", flush=True)
        for text in self.wrong[:10]:
            print(f"    {text}")


@dataclass(frozen=True)
class Case:
    """A conversion and its undisturbed result."""

    way: str
    source: Path
    reference: Path

    def run(self, target: Path, workers: int = 1) -> None:
        """As ``rlhpc convert`` does; raises UserError."""
        side = read_side(self.source)
        kind = "megatron" if self.way == WAYS[0] else "hf"
        sizes = {"piece_bytes": PIECE_BYTES, "file_bytes": FILE_BYTES}
        convert(plan_conversion(side, kind, plan_layout(side, {"tp": 2}), **sizes), target, workers)

    def start(self, target: Path, workers: int = 1) -> int:
        """The same in a process of its own; its pid. It ends with 2 after a UserError, which it prints."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            self.run(target, workers)
            code = 0
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def main(arguments: list[str]) -> int:
    """Prints the table; 1 if a result differs or a damage passes."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=100, help="kills each way")
    options.add_argument("--damages", type=int, default=300, help="damages, half of them of either kind of folder")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", type=Path, help="folder for a temporary folder; default: the system's")
    asked = options.parse_args(arguments)
    chance, began, good = random.Random(asked.seed), time.monotonic(), True
    print(f"{'':24} {'results':>8} {'kills':>6} {'kept files':>11} {'wrong':>6}  ends", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="hostile-") as name:
        for case in make_cases(Path(name)):
            for part, times in ((killed, asked.kills), (damaged, asked.damages // 2)):
                row = part(case, Path(name), times, chance)
                row.show()
                good = good and not row.wrong
    print(f"{time.monotonic() - began:.0f} s, seed {asked.seed}")
    return not good


def make_cases(folder: Path) -> Iterator[Case]:
    """A model of 450 kB, each way, with undisturbed results."""
    source = write_random_model(folder / "hf", num_hidden_layers=4, vocab_size=64)
    there, back = folder / "megatron", folder / "back"
    for case in (Case(WAYS[0], source, there), Case(WAYS[1], there, back)):
        case.run(case.reference)
        yield case


def killed(case: Case, folder: Path, times: int, chance: random.Random) -> Row:
    """Conversions that are killed at random moments and then resumed."""
    row, target = Row(f"killed {case.way}"), folder / "killed" / "out"
    target.parent.mkdir()
    usual = min(_seconds(case, target) for _ in range(3))  # a slow one would let nearly all others end
    while row.kills < times:
        shutil.rmtree(target, ignore_errors=True)
        done: dict[str, int] = {}
        for _ in range(4):
            pid = case.start(target, workers=chance.choice([1, 1, 2]))
            time.sleep(chance.random() * usual)
            os.kill(pid, signal.SIGKILL)
            end = _end_of(pid)
            row.kills += end == "killed"
            if end == "0":
                break
            done = _finished(Partial(target).files) | done
        row.ends.update(["last " + _end_when_free(case, target)])
        row.results += 1
        row.kept += len(done)
        row.wrong += [f"differs: {name}" for name in _differing(target, case.reference)]
        row.wrong += verify(case.source, target, workers=1).faults if target.is_dir() else ["no result"]
        now = _finished(target)
        row.wrong += [f"written twice: {name}" for name, at in done.items() if now.get(name) != at]
        row.wrong += [f"left behind: {path}" for path in target.parent.iterdir() if path != target]
    shutil.rmtree(target.parent)
    return row


def _finished(folder: Path) -> dict[str, int]:
    """Time of modification of each finished file of weights."""
    files = [*folder.glob("*.safetensors"), *folder.glob("release/__*_0.distcp")]
    objects = max((int(file.name.split("_")[2]) for file in files if file.suffix == ".distcp"), default=-1)
    times = {}
    for file in files:
        if file.suffix != ".distcp" or int(file.name.split("_")[2]) < objects:
            times[str(file.relative_to(folder))] = file.stat().st_mtime_ns
    return times


def damaged(case: Case, folder: Path, times: int, chance: random.Random) -> Row:
    """Damages of a result."""
    row, copy, model = Row(f"damaged {case.way}"), folder / "damaged", folder / "hf"
    for number in range(times):
        shutil.copytree(case.reference, copy)
        how = DAMAGES[number % len(DAMAGES)]
        what = f"{how} {_damage(copy, how, chance)}"
        end = _found(model, copy, case.reference, folder / "loaded")
        row.ends[f"{how}: {end or 'PASSED'}"] += 1
        row.results += 1
        row.wrong += [] if end else [f"passed: {what}"]
        shutil.rmtree(copy)
    return row


def _damage(folder: Path, how: str, chance: random.Random) -> str:
    """Damages one file; its name, and the bit or size. Of flipped bits half are in any file, half by size."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    file = chance.choice(files) if chance.random() < 0.5 else chance.choices(files, sizes)[0]
    size, name = file.stat().st_size, str(file.relative_to(folder))
    if how == "missing":
        file.unlink()
    elif how == "foreign":
        foreign = file.with_name(chance.choice(["notes.txt", "__99_0.distcp", "model-00009-of-00009.safetensors"]))
        foreign.write_bytes(file.read_bytes())
        return str(foreign.relative_to(folder))
    elif how == "cut":
        size = chance.randrange(size)
        os.truncate(file, size)
        return f"{name} to {size}"
    else:
        at, bit = chance.randrange(size), chance.randrange(8)
        data = bytearray(file.read_bytes())
        data[at] ^= 1 << bit
        file.write_bytes(data)
        return f"{name} byte {at} bit {bit}"
    return name


def _found(source: Path, folder: Path, whole: Path, again: Path) -> str:
    """Failure by which a damage of ``whole`` shows; empty if it passes."""
    if verify(source, folder, workers=1).faults:
        return "found"
    try:
        to_huggingface(folder, again)
        if differing(source, again):
            return ""
    except UserError:
        return "refused"
    finally:
        shutil.rmtree(again, ignore_errors=True)
    try:
        return "loads equal" if _loads_equal(folder, whole) else ""
    except Exception as error:  # of another program's reader
        return f"refused by it ({type(error).__name__})"


def _loads_equal(folder: Path, whole: Path) -> bool:
    """True if safetensors, or torch, reads the same tensors from both folders."""
    if not (whole / "release").is_dir():
        return not differing(whole, folder)
    for saved in read_index(whole / "release").tensors.values():
        for chunk in saved.chunks:
            files = (folder / "release" / chunk.file, whole / "release" / chunk.file)
            parts = (file.read_bytes()[chunk.start : chunk.start + chunk.length] for file in files)
            if not torch.equal(*(torch.load(io.BytesIO(part), weights_only=True) for part in parts)):
                return False
    return True


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
    """Names of files whose bytes differ. A record differs in nothing: both have the same source."""
    names = {str(path.relative_to(folder)) for folder in (target, reference) for path in folder.rglob("*")}
    return [
        name
        for name in sorted(names)
        if not (reference / name).is_dir() and _bytes_of(target / name) != _bytes_of(reference / name)
    ]


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
