"""Time to compute the plan of a weight sync, as every rank does at startup, and the quality of the plan."""

from __future__ import annotations

import resource
import time

from rlhpc.models import ModelShape, shape_of
from rlhpc.reshard.plan import lower_bound
from rlhpc.reshard.sides import plan_weight_sync, sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from rlhpc.sharding.layout import ParallelLayout
from tests.helpers.published import DEEPSEEK_V3_BF16, QWEN3_235B_A22B, QWEN25_72B

BUCKET = 256 << 20
CASES = {
    "Qwen2.5-72B": (QWEN25_72B, ParallelLayout(96, tp=8, pp=6, first_stage_layers=14, last_stage_layers=10), 8),
    "Qwen3-235B": (
        QWEN3_235B_A22B,
        ParallelLayout(32, tp=4, pp=8, ep=4, first_stage_layers=11, last_stage_layers=11),
        8,
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3_BF16,
        ParallelLayout(96, tp=8, pp=12, ep=8, first_stage_layers=6, last_stage_layers=5),
        32,
    ),
    "DeepSeek-V3, larger": (
        DEEPSEEK_V3_BF16,
        ParallelLayout(1024, tp=8, pp=16, ep=64, first_stage_layers=3, last_stage_layers=2),
        32,
    ),
}


def main() -> None:
    print(f"plans for nodes of 8 ranks, bfloat16, buffers of {BUCKET >> 20} MiB; one process")
    print(
        "model               ranks    CPU s   wall s  memory MiB        copies  buckets  received/least  most sent/mean"
    )
    for name, (fields, layout, tp) in CASES.items():
        _measure(name, shape_of(fields), layout, tp)


def _measure(name: str, shape: ModelShape, layout: ParallelLayout, tp: int) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    sides = sync_sides(shape, layout, EngineLayout(tp))
    plan = plan_weight_sync(sides, ranks_per_node=8, bucket_bytes=BUCKET, itemsize=2, rank=0)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of this case or an earlier one
    sent = [traffic.sent for traffic in plan.traffic.values()]
    least = sum(lower_bound(sides.source, sides.target, 2).values())
    print(
        f"{name:<20}{layout.world_size:>5}{cpu:9.1f}{wall:9.1f}{memory:12.0f}{plan.num_copies:14,}{plan.num_buckets:9}"
        f"{sum(sent) / least:16.3f}{max(sent) * len(sent) / sum(sent):16.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
