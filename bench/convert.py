"""Conversions of a model of several gigabytes vs. copying its bytes, and vs. loading and saving the whole model.

    python -m bench.convert                  # 4 GB; needs 13 GB of disk, and 10 GB of memory for the peer
    python -m bench.convert --gb 1 --no-peer

Each way is a separate process, timed from start to end with the source in the page cache. A copy is timed twice: until
``cp`` ends, with bytes still in memory, and until they are on disk, as conversions always wait for. Memory is the peak
resident size of the largest process, and the sum of all peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlhpc.core import env

ROOT = Path(__file__).resolve().parent.parent
GB, MIB = 10**9, 1 << 20


@dataclass(frozen=True)
class Cost:
    """Seconds, and peak MiB of the largest process and of all together."""

    seconds: float
    largest: float
    together: float


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


def peer_main(source: Path, target: Path) -> None:
    """Conversion without a converter: loads the model with transformers, arranges parameters as in Megatron, and saves
    them with megatron-core."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from transformers import AutoModelForCausalLM

    from rlhpc.checkpoint.formats.torch_dist import checkpoint_parameters
    from rlhpc.models import read_model
    from rlhpc.parallel.compat import megatron_device

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    state: dict[str, Any] = {}
    for number, parameter in enumerate(checkpoint_parameters(read_model(source))):
        whole = torch.empty(parameter.shape, dtype=torch.bfloat16)
        for shard in parameter.shards:
            whole[shard.local_box.slices] = weights[shard.tensor.name][shard.box.slices]
        layer = [(0, parameter.layer, parameter.stack)] if parameter.stack else []
        state[str(number)] = ShardedTensor.from_rank_offsets(
            parameter.key, whole, *layer, prepend_axis_num=len(layer), replica_id=0
        )
    target.mkdir()
    with megatron_device():  # without a GPU, megatron-core's writer would require one
        dist_checkpointing.save(state, str(target))
    os.sync()


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


def rounds_of(folder: Path, workers: int, *, peer: bool) -> dict[str, Cost]:
    """Run each way once, removing its output before the next."""
    model, there, back, other = (folder / name for name in ("model", "megatron", "back", "other"))
    convert = [sys.executable, "-m", "rlhpc.cli.main", "convert"]
    options = ["--workers", str(workers)]
    found: dict[str, Cost] = {}

    def copied(name: str, source: Path) -> None:
        os.sync()
        cost = measure(["cp", "-r", str(source), str(other)])
        began = time.perf_counter()
        subprocess.run(["sync", "-f", str(other)], check=True)
        found[f"cp -r {name}"] = cost
        found[f"cp -r {name}, on disk"] = Cost(cost.seconds + time.perf_counter() - began, cost.largest, cost.together)
        shutil.rmtree(other)
        os.sync()

    copied("of HuggingFace's", model)
    found["to Megatron"] = measure([*convert, "hf-to-megatron", str(model), str(there), *options])
    copied("of Megatron's", there)
    found["to HuggingFace"] = measure([*convert, "megatron-to-hf", str(there), str(back), *options])
    shutil.rmtree(back)
    shutil.rmtree(there)
    if peer:
        os.sync()
        found["transformers and dist_checkpointing"] = measure(
            [sys.executable, "-m", "bench.convert", "--peer", str(model), str(other)]
        )
        shutil.rmtree(other)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer_main(*map(Path, options.peer))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        size = make_model(Path(name) / "model", options.gb)
        load = os.getloadavg()[0]
        print(f"model of {size / GB:.2f} GB, {options.workers} workers, load {load:.1f} on {os.cpu_count()} cores")
        costs: dict[str, list[Cost]] = {}
        for _ in range(options.rounds):
            for way, cost in rounds_of(Path(name), options.workers, peer=not options.no_peer).items():
                costs.setdefault(way, []).append(cost)
    middle = {way: statistics.median(cost.seconds for cost in found) for way, found in costs.items()}
    for way, found in costs.items():
        seconds = ", ".join(f"{cost.seconds:.1f}" for cost in found)
        largest, together = (max(getattr(cost, field) for cost in found) for field in ("largest", "together"))
        rate = size / middle[way] / GB
        print(f"{way:36} {rate:6.2f} GB/s ({seconds} s), {largest:6,.0f} MiB, all {together:6,.0f} MiB")
    for way, copy in (("to Megatron", "of HuggingFace's"), ("to HuggingFace", "of Megatron's")):
        plain, on_disk = middle[f"cp -r {copy}"], middle[f"cp -r {copy}, on disk"]
        print(f"{way}: {plain / middle[way]:.2f} x the speed of cp -r, {on_disk / middle[way]:.2f} x with sync")
    if not options.no_peer:
        peer = "transformers and dist_checkpointing"
        memory = max(c.together for c in costs["to Megatron"]) / max(c.together for c in costs[peer])
        print(
            f"to Megatron: {middle[peer] / middle['to Megatron']:.1f} x the speed of {peer}, {memory:.2f} x its memory"
        )


if __name__ == "__main__":
    main()
