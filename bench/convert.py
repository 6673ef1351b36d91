"""Conversions of a model of several gigabytes beside the disk's own limit and a durable copy.

    python -m bench.convert                  # 4 GB; needs 13 GB of disk
    python -m bench.convert --gb 1 --rounds 2

A way is timed from the start of its process until its bytes are on disk: a copy is followed by an fsync of every file.
Before each, nothing is unwritten in the kernel (sync), and the source is in the page cache as a whole (warm) or not at
all (cold). Ways come in another order in each round. The limit is a sequential write of the same number of bytes past
the page cache, by as many processes as the conversion has workers. Megatron's files are written by torch, whose import
is timed too and left out of the ratios. HuggingFace's files have at most 2 GB, as the model's have. Memory is the peak
resident size of the largest process, and the sum of all peaks.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.core import env

ROOT = Path(__file__).resolve().parent.parent
GB, MIB = 10**9, 1 << 20
_BLOCK = 8 << 20  # of direct writes
IMPORT = "import of torch"
HEAD = [
    "direction", "cache", "way", "median s", "no import", "each", "GB/s", "of the limit", "of cp", "MiB", "all MiB",
]  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Seconds, and peak MiB of the largest process and of all together."""

    seconds: float
    largest: float = 0.0
    together: float = 0.0


@dataclass(frozen=True)
class Way:
    """One thing to time. ``direction``: what is read; ``cache``: warm, cold, or empty where nothing is read."""

    direction: str
    cache: str
    name: str
    source: Path
    run: Callable[[Path], Cost]


def make_model(folder: Path, gigabytes: float) -> int:
    """Write a Qwen2 model in bfloat16 with random finite weights; returns its bytes."""
    import numpy as np

    from rlhpc.checkpoint.formats.safetensors_headers import plan_files
    from rlhpc.models import shape_of
    from rlhpc.sharding.shards import model_tensors

    fields: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 151936,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    sizes = [_bytes({**fields, "num_hidden_layers": layers}) for layers in (1, 2)]
    fields["num_hidden_layers"] = max(2, round((gigabytes * GB - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = [(tensor.name, "BF16", tensor.shape) for tensor in model_tensors(shape_of(fields))]
    generator, total = np.random.default_rng(0), 0
    files = plan_files(tensors, 2 * GB)
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.header)
            left = file.size - len(file.header)
            while left:
                block = generator.integers(0, 1 << 16, min(left // 2, 1 << 24), dtype=np.uint16)
                left -= out.write((block & 0xBFFF).tobytes())  # clears an exponent bit: no infinities
        total += file.size
    where = {name: file.name for file in files for name, _, _, _ in file.tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return total


def _bytes(fields: dict[str, Any]) -> int:
    from rlhpc.models import shape_of
    from rlhpc.sharding.shards import model_tensors

    return 2 * sum(prod(tensor.shape) for tensor in model_tensors(shape_of(fields)))


def measure(command: list[str]) -> Cost:
    """Cost of a command; memory of its processes is sampled fifty times per second."""
    peaks: dict[int, int] = {}
    began = time.perf_counter()
    environ = {**os.environ, env.OMP_NUM_THREADS: "1", env.TORCHDYNAMO_DISABLE: "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        while process.poll() is None:
            for pid in _tree(process.pid):
                peaks[pid] = max(peaks.get(pid, 0), _peak(pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode(errors="replace")[-3000:])
    return Cost(seconds, max(peaks.values(), default=0) / MIB, sum(peaks.values()) / MIB)


def _tree(pid: int) -> list[int]:
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(found for child in below for found in _tree(int(child)))]


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


# --- conditions


def warm(folder: Path) -> None:
    """Reads every file, so that the page cache has it."""
    buffer = bytearray(_BLOCK)
    for file in _files(folder):
        with open(file, "rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def cold(folder: Path) -> None:
    """Removes every file from the page cache; its pages must be on disk."""
    for file in _files(folder):
        with open(file, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(folder: Path) -> float:
    """Share of a folder's bytes in the page cache; NaN without fincore (util-linux)."""
    files = _files(folder)
    try:
        done = subprocess.run(
            ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)], capture_output=True, text=True
        )
    except OSError:
        return float("nan")
    return sum(map(int, done.stdout.split())) / max(1, sum(file.stat().st_size for file in files))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- ways


def converted(source: Path, target: str, workers: int) -> Callable[[Path], Cost]:
    """A conversion, which ends when its bytes are on disk."""
    command = [sys.executable, "-m", "rlhpc.cli.main", "convert", "auto", "--to", target, "--workers", str(workers)]
    command += ["--max-shard-size", "2GB"] if target == "hf" else []
    return lambda other: measure([*command, str(source), str(other)])


def copied(source: Path) -> Callable[[Path], Cost]:
    """``cp -r``, then an fsync of each file and folder."""

    def run(other: Path) -> Cost:
        cost = measure(["cp", "-r", str(source), str(other)])
        began = time.perf_counter()
        for path in (*_files(other), other, other.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return replace(cost, seconds=cost.seconds + time.perf_counter() - began)

    return run


def imported(other: Path) -> Cost:
    """Time of the imports for Megatron's files."""
    other.mkdir()
    began, plain = measure([sys.executable, "-c", "import rlhpc.convert.torch_dist_files"]), [sys.executable, "-c", ""]
    return replace(began, seconds=began.seconds - measure(plain).seconds)


def limit(size: int, writers: int) -> Callable[[Path], Cost]:
    """Sequential writes past the page cache, each into a file of its own, then an fsync."""

    def run(other: Path) -> Cost:
        other.mkdir()
        began = time.perf_counter()
        pids = []
        for number in range(writers):
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    _write(other / str(number), size // writers)
                    os._exit(0)
                finally:
                    os._exit(1)
        assert not any(os.waitpid(pid, 0)[1] for pid in pids), "the disk is full, or has no direct writes"
        return Cost(time.perf_counter() - began)

    return run


def _write(path: Path, size: int) -> None:
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(_BLOCK))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    for _ in range(-(-size // _BLOCK)):
        os.write(descriptor, buffer)
    os.fsync(descriptor)


def ways_of(folder: Path, size: int) -> list[Way]:
    """Every way of a round, from the model and its converted form in the folder."""
    model, there = folder / "model", folder / "megatron"
    found = []
    for direction, source, target in (("to Megatron", model, "megatron"), ("to HuggingFace", there, "hf")):
        for cache in ("warm", "cold"):
            for workers in (1, 2):
                name = f"rlhpc convert, {workers} worker{'s' if workers > 1 else ''}"
                found.append(Way(direction, cache, name, source, converted(source, target, workers)))
            found.append(Way(direction, cache, "cp -r and fsync", source, copied(source)))
        for writers in (1, 2):
            name = f"direct write, {writers} process{'es' if writers > 1 else ''}"
            found.append(Way(direction, "", name, source, limit(size, writers)))
    return [*found, Way("to Megatron", "", IMPORT, model, imported)]


def timed(way: Way, other: Path) -> Cost:
    """Cost of a way, after its conditions are made; its output is removed."""
    os.sync()
    if way.cache:
        (warm if way.cache == "warm" else cold)(way.source)
        share = cached(way.source)
        if share < 0.99 if way.cache == "warm" else share > 0.01:
            print(f"{way.direction}, {way.name}: {share:.0%} of the source is cached, not {way.cache}", file=sys.stderr)
    os.sync()
    cost = way.run(other)
    shutil.rmtree(other)
    os.sync()
    return cost


# --- table


def rows_of(ways: list[Way], costs: list[list[Cost]], size: int) -> list[list[str]]:
    """A row for each way: median, speed, and both compared with the limit of as many processes and with a copy."""
    middle = {way_key(way): statistics.median(c.seconds for c in found) for way, found in zip(ways, costs, strict=True)}
    rows = []
    for way, found in zip(ways, costs, strict=True):
        seconds = middle[way_key(way)]
        if way.direction == "to Megatron" and "convert" in way.name:
            seconds -= middle["to Megatron", "", IMPORT]
        number = 2 if "2 worker" in way.name else 1
        bound = middle[way.direction, "", f"direct write, {number} process{'es' if number > 1 else ''}"]
        copy = middle.get((way.direction, way.cache, "cp -r and fsync"))
        rows.append(
            [
                way.direction,
                way.cache or "-",
                way.name,
                f"{middle[way_key(way)]:.2f}",
                f"{seconds:.2f}",
                ", ".join(f"{cost.seconds:.2f}" for cost in found),
                f"{size / seconds / GB:.2f}",
                f"{bound / seconds:.2f}",
                f"{copy / seconds:.2f}" if copy else "",
                f"{max(c.largest for c in found):,.0f}" if found[0].largest else "",
                f"{max(c.together for c in found):,.0f}" if found[0].together else "",
            ]
        )
    return rows


def way_key(way: Way) -> tuple[str, str, str]:
    """Its row in the table."""
    return way.direction, way.cache, way.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the order of ways")
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = make_model(folder / "model", options.gb)
        converted(folder / "model", "megatron", 1)(folder / "megatron")
        ways = ways_of(folder, size)
        costs: list[list[Cost]] = [[] for _ in ways]
        loads = [os.getloadavg()[0]]
        for _ in range(options.rounds):
            for index in chance.sample(range(len(ways)), len(ways)):
                costs[index].append(timed(ways[index], folder / "other"))
            loads.append(os.getloadavg()[0])
    print(
        f"{size / GB:.2f} GB, {options.rounds} rounds in orders of seed {options.seed}, {os.cpu_count()} cores, load "
        f"{loads[0]:.1f} before and {', '.join(f'{load:.1f}' for load in loads[1:])} after each round\n"
    )
    for row in (HEAD, ["---"] * len(HEAD), *rows_of(ways, costs, size)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
