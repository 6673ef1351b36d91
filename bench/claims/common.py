"""Parts that the claims share: models, a trainer on one rank, rows of the table."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.workload import SEED, WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def one_thread() -> None:
    """To be called first: torch and vLLM read these when they are imported."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def model_of(name: str) -> Iterator[tuple[Workload, Path]]:
    """A workload and a folder with its random model."""
    from bench.models import build_model, build_tokenizer

    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory(prefix="bench-claims-") as folder, contextlib.redirect_stdout(sys.stderr):
        build_model(workload).save_pretrained(folder)
        build_tokenizer(workload).save_pretrained(folder)
        yield workload, Path(folder)


def engine_of(folder: Path, context: int, **section: Any) -> Any:
    """rlhpc's engine, awake and with the folder's weights."""
    from safetensors.torch import load_file

    from bench.rig import make_engine
    from rlhpc.models import read_model

    engine = make_engine(folder, read_model(folder), "float32", context, kv_cache_gib=0.5, **section)
    engine.wake_weights()
    engine.load_weights(iter(load_file(folder / "model.safetensors").items()))
    engine.wake_cache()
    return engine


def trainer_of(folder: Path) -> Any:
    """rlhpc's Megatron back end on this process alone, with an optimizer."""
    import torch.distributed as dist

    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import OptimizerSection, ParallelSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.sharding.layout import make_layout

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    parallel, shape = ParallelSection(), read_model(folder)
    layout = make_layout(parallel, 1)
    build_groups(layout, seed=0)
    settings = ModelSettings(parallel, optimizer=OptimizerSection())
    backend = MegatronBackend(shape, layout, RankInfo.from_environ(), "float32", settings)
    backend.load_pretrained(folder)
    return backend


def update(backend: Any, batches: Sequence[Any], tokens: int) -> None:
    """One update by negative log-likelihood on responses of so many tokens."""
    from bench.rig import likelihood_loss

    backend.train(batches, likelihood_loss, tokens, 1.0, 1e-8)


def sequences_of(workload: Workload) -> list[tuple[Any, int]]:
    """Tokens and prompt length of a third of a step's samples, with the workload's lengths."""
    import random

    import numpy as np

    from bench.rollout import make_batch

    rng = random.Random(SEED)
    return [
        (np.array([*prompt, *(rng.randrange(3, workload.vocab) for _ in range(length))], np.int32), len(prompt))
        for prompt, length in make_batch(workload)[::3]
    ]


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int = 2) -> dict[str, float]:
    """Median seconds of each way, which take turns; each has run once before."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def resident() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def done(*cells: str) -> None:
    """Prints the row, and ends the process: vLLM's and Megatron's ends are slow."""
    print(row(*cells), flush=True)
    sys.stdout.flush()
    os._exit(0)
