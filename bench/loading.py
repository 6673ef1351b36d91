"""Reading a model's weights from a torch_dist checkpoint vs. from HuggingFace files: same ranks, cores and layout.

    python -m bench.loading                 # 1 GB in bfloat16, two ranks, tp 2

Both are in the page cache; ways come in turn. The target is at most 1.5 times the time of HuggingFace files. Rows
differ in the layout that the checkpoint was cut for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.convert import make_model
from rlhpc.convert.execute import convert
from rlhpc.convert.plan import plan_conversion, plan_layout
from rlhpc.convert.sides import read_side
from tests.helpers.distributed import run_ranks

TARGET = 1.5
_CUTS: dict[str, dict[str, int]] = {"cut for tp 2": {"tp": 2}, "cut for tp 1": {}, "cut for tp 4": {"tp": 4}}


def load_in_turn(folders: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """On each rank: seconds of each load, by name."""
    import torch.distributed as dist

    from tests.helpers.training import make_actor

    backend: Any = make_actor(next(iter(folders.values())), dtype="bfloat16", tp=2)
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    for number in range(rounds + 1):
        for name, folder in folders.items():
            dist.barrier()
            began = time.perf_counter()
            backend.load_pretrained(folder)
            dist.barrier()
            if number:  # the first fills the page cache
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-loading-") as name:
        folders = {"HuggingFace": Path(name) / "hf"}
        make_model(folders["HuggingFace"], options.gb)
        for cut, axes in _CUTS.items():
            side = read_side(folders["HuggingFace"])
            folders[cut] = Path(name) / cut.replace(" ", "-")
            convert(plan_conversion(side, "megatron", plan_layout(side, axes)), folders[cut], workers=2)
        from bench.loading import load_in_turn as of_module  # this file may be __main__, which ranks lack

        seconds = run_ranks(of_module, 2, folders, options.rounds)[0]
    print("weights       s      ratio  rounds")
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for way, found in seconds.items():
        ratio = medians[way] / medians["HuggingFace"]
        print(f"{way:12}  {medians[way]:.2f}  {ratio:5.2f}  {', '.join(f'{value:.2f}' for value in found)}")
    return int(max(medians.values()) > TARGET * medians["HuggingFace"])


if __name__ == "__main__":
    sys.exit(main())
