"""A push from training to engine on one GPU, against the device's own copy bandwidth.

    python -m bench.push_gpu          # Llama-3.1-8B's shape in bfloat16: about 34 GB of GPU memory
    python -m bench.push_gpu tiny

Weights are random, nothing is read but the shape. Both layouts are uncut, so that every byte is copied inside the GPU:
read once and written once. The limit is what one large copy of PyTorch's reaches in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.mfu import SHAPES

GIB = 1 << 30


def measure(name: str, pushes: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    assert torch.cuda.is_available(), "this benchmark needs a GPU"
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    with tempfile.TemporaryDirectory() as folder:
        manager = _manager(Path(folder), SHAPES[name])
    size = sum(copy.box.volume * 2 for copy in manager.plan.copies)
    manager.push()
    whole, moved = [], []
    for _ in range(pushes):
        manager.sleep()
        whole.append(_seconds(manager.push))
        moved.append(_seconds(manager.write))
    bandwidth = _copy_bandwidth()
    seconds = statistics.median(moved)
    return {
        "GB": size / 1e9,
        "seconds to move": seconds,
        "seconds with waking": statistics.median(whole),
        "GB/s read and written": 2 * size / seconds / 1e9,
        "share of a plain copy's bandwidth": 2 * size / seconds / bandwidth,
        "verified, seconds": _seconds(manager.verify),
    }


def _manager(folder: Path, fields: dict[str, Any]) -> Any:
    import torch

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.schema import ParallelSection, ReshardSection, RolloutSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.plan.engine import EngineLayout
    from rlhpc.plan.layout import ParallelLayout
    from rlhpc.plan.push import push_sides
    from rlhpc.reshard import Job, ReshardManager
    from rlhpc.rollout.vllm_engine import VllmEngine

    model_type = fields["architectures"][0].removesuffix("ForCausalLM").lower()
    config = {**fields, "model_type": model_type, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shape, layout, info = read_model(folder), ParallelLayout(1), RankInfo.from_environ()
    build_groups(layout, seed=0)
    actor = MegatronBackend(shape, layout, info, "bfloat16", ParallelSection(), None)
    section = RolloutSection(kv_cache_gib=1.0, max_running=8, cuda_graphs=False)
    engine = VllmEngine(folder, shape, section, dtype="bfloat16", max_model_len=512, end_tokens=())
    job = Job(1, torch.bfloat16, torch.device("cuda", 0))
    sides = push_sides(shape, layout, EngineLayout(1))
    return ReshardManager(actor, engine, sides, ReshardSection(verify="never"), job)


def _copy_bandwidth() -> float:
    """Bytes read and written in a second."""
    import torch

    source = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(10))


def _seconds(action: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES), nargs="?", default="8b")
    parser.add_argument("--pushes", type=int, default=10)
    options = parser.parse_args()
    for name, value in measure(options.shape, options.pushes).items():
        print(f"{name:<36}{value:.4g}")


if __name__ == "__main__":
    main()
