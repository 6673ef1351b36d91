"""Weight sync: the direct method vs. gathering whole tensors, on the same ranks.

    python -m bench.reshard                    # a model of 640 MB, several pairs of layouts, 4 ranks on gloo
    python -m bench.reshard --layers 24 --rounds 5

Both end with vLLM's weights packed for its kernels and its cache awake. Times are medians over alternating rounds, from
barrier to barrier. Traffic is counted on the loopback device, which nothing else may use meanwhile; extra memory is the
largest increase of a rank's resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.server import rank_outputs

RANKS = 4
MIB = 1 << 20
PAIRS: list[tuple[dict[str, int], int]] = [
    ({"tp": 2, "pp": 2}, 4),
    ({"tp": 4}, 4),
    ({"tp": 4}, 1),
    ({"tp": 2}, 2),
    ({"pp": 2}, 2),
    ({"tp": 2, "pp": 2}, 1),
    ({}, 1),
    ({}, 4),
]


@dataclass(frozen=True)
class Cost:
    """Cost of a weight sync: seconds, MiB over the network by all ranks, and extra MiB of the worst rank."""

    seconds: float
    traffic: float
    memory: float


def make_model(folder: Path, layers: int) -> int:
    """Writes a random Qwen2 model in float32; returns its bytes."""
    from bench.models import save_random_model

    return save_random_model(
        folder,
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )


def rank_main(model: Path, axes: dict[str, int], tp: int, rounds: int) -> None:
    """Program of a rank for one pair of layouts; the first rank prints the costs of each method as JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    managers = _managers(model, axes, tp)
    costs: dict[str, list[Cost]] = {name: [] for name in managers}
    for turn in range(rounds + 1):
        for name, manager in managers.items():
            cost = _weight_sync(manager)
            if turn:  # the first round connects and allocates
                costs[name].append(cost)
    if dist.get_rank() == 0:
        print(json.dumps({name: [asdict(cost) for cost in found] for name, found in costs.items()}), flush=True)
    dist.barrier()
    os._exit(0)  # vLLM's shutdown is slow


def _managers(model: Path, axes: dict[str, int], tp: int) -> dict[str, Any]:
    """A manager for each method, with the same actor and engine."""
    import torch

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.schema import ReshardSection, RolloutSection
    from rlhpc.config.training import ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.reshard.manager import Job, ReshardManager
    from rlhpc.reshard.sides import sync_sides
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine
    from rlhpc.sharding.engine_shards import EngineLayout
    from rlhpc.sharding.layout import make_layout

    info, shape, parallel = RankInfo.from_environ(), read_model(model), ParallelSection(**axes)
    layout = make_layout(parallel, info.world_size)
    build_groups(layout, seed=0)
    actor = MegatronBackend(shape, layout, info, "float32", ModelSettings(parallel))
    actor.load_pretrained(model)
    section = RolloutSection(tp=tp, kv_cache_gib=0.0625, max_num_seqs=8)
    engine = VllmEngine(ServedModel(model, shape, "float32", 256), section)
    sides, job = sync_sides(shape, layout, EngineLayout(tp)), Job(RANKS, torch.float32, torch.device("cpu"))
    ways = {
        "direct": ReshardSection(verify="never"),
        "verified": ReshardSection(verify="always"),
        "gather": ReshardSection(method="gather"),
    }
    return {name: ReshardManager(actor, engine, sides, way, job) for name, way in ways.items()}


def _weight_sync(manager: Any) -> Cost:
    import torch
    import torch.distributed as dist

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident size
    before, carried = _resident("VmRSS"), _carried()
    dist.barrier()
    began = time.perf_counter()
    manager.sync()
    dist.barrier()
    seconds = time.perf_counter() - began
    memory = torch.tensor([_resident("VmHWM") - before])
    traffic = (_carried() - carried) / MIB
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    manager.sleep()
    return Cost(seconds, traffic, memory.item())


def _resident(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def _carried() -> int:
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


def measure(model: Path, axes: dict[str, int], tp: int, rounds: int) -> dict[str, Cost]:
    """Median costs of each method."""
    outputs = rank_outputs("bench.reshard", [str(model), axes, tp, rounds], RANKS, 29871)
    costs = json.loads(outputs[0].splitlines()[-1])
    fields = ("seconds", "traffic", "memory")
    return {
        name: Cost(*(statistics.median(cost[field] for cost in found) for field in fields))
        for name, found in costs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        model, axes, tp, rounds = json.loads(options.rank_of)
        rank_main(Path(model), axes, tp, rounds)
    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), options.layers) / MIB
        print(f"model of {size:,.0f} MiB on {RANKS} ranks; seconds, MiB over the network, MiB of extra memory")
        for axes, tp in PAIRS:
            costs = measure(Path(name), axes, tp, options.rounds)
            direct, gather = costs["direct"], costs["gather"]
            layout = " ".join(f"{axis}={size}" for axis, size in axes.items()) or "dp only"
            shown = "; ".join(f"{way} {c.seconds:.2f} s {c.traffic:,.0f} {c.memory:,.0f}" for way, c in costs.items())
            faster, less = gather.seconds / direct.seconds, direct.traffic / max(gather.traffic, 1)
            print(f"{layout} -> tp={tp}: {shown}: {faster:.1f} x faster, {less:.2f} x the traffic", flush=True)


if __name__ == "__main__":
    main()
