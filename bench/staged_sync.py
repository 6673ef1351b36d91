"""Weight sync to an engine that goes on generating: for how long it stands still, and what its steps cost meanwhile.

    python -m bench.staged_sync            # a model of 106 MiB, a trainer and an engine of one rank each, on gloo
    python -m bench.staged_sync --rounds 20 --hidden 1024

Each rank has one thread; two cores must be idle. A switch is the write of a version that has arrived, between two steps
with requests in flight, packed for vLLM's kernels. It is compared with the same write from tensors of the engine's own
process, in turn; medians. Limits: no poll above 10 ms, a switch at most 1.2 times the local write.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.server import rank_outputs

MIB = 1 << 20
REQUESTS, POLL_SECONDS, SWITCH = 16, 0.010, 1.2


def make_model(folder: Path, hidden: int) -> int:
    """Writes a random Qwen2 model in float32; returns its bytes."""
    from bench.models import save_random_model

    return save_random_model(
        folder,
        vocab_size=4000,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )


def rank_main(model: Path, rounds: int) -> None:
    """Program of a rank: the first trains, the other one generates and prints its figures as JSON."""
    import torch

    from rlhpc.config.schema import ReshardSection
    from rlhpc.core.rank import RankInfo
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import job_store, join
    from rlhpc.reshard.sides import sync_sides
    from rlhpc.reshard.staged.job import StagedJob
    from rlhpc.sharding.engine_shards import EngineLayout
    from rlhpc.sharding.layout import ParallelLayout

    torch.set_num_threads(1)
    info, shape = RankInfo.from_environ(), read_model(model)
    info = info.in_role(("trainer", "engine")[info.rank], info.rank, 1)
    join(info)
    sides = sync_sides(shape, ParallelLayout(1), EngineLayout(1), [0], [1])
    job = StagedJob(info.job_rank, 1, torch.float32, torch.device("cpu"), job_store())
    section = ReshardSection(verify="never", bucket_mib=4)
    if info.role == "trainer":
        _train(model, info, (sides, section, job), rounds)
    else:
        print(json.dumps(_generate(model, (sides, section, job), rounds)), flush=True)
    job.store.set(f"ended {job.rank}", "1")
    if job.rank == 0:  # it has the store
        job.store.wait(["ended 1"])
    os._exit(0)  # vLLM's shutdown is slow


def _train(model: Path, info: Any, ends: tuple[Any, Any, Any], rounds: int) -> None:
    """Publishes a version whenever the engine asks for one."""
    from rlhpc.backends.megatron import MegatronBackend
    from rlhpc.config.model_settings import ModelSettings
    from rlhpc.config.training import ParallelSection
    from rlhpc.models import read_model
    from rlhpc.parallel.groups import build_groups
    from rlhpc.reshard.staged.source import WeightSource
    from rlhpc.sharding.layout import ParallelLayout

    layout = ParallelLayout(1)
    build_groups(layout, seed=0)
    actor = MegatronBackend(read_model(model), layout, info, "float32", ModelSettings(ParallelSection()))
    actor.load_pretrained(model)
    source, seconds = WeightSource(actor, *ends), []
    for version in range(rounds + 1):
        ends[2].store.wait([f"wanted {version}"])
        began = time.perf_counter()
        source.publish(version)
        seconds.append(time.perf_counter() - began)
    source.close()
    ends[2].store.set("published", json.dumps(seconds))


def _generate(model: Path, ends: tuple[Any, Any, Any], rounds: int) -> dict[str, Any]:
    """Figures of the engine's rank."""
    from rlhpc.config.schema import RolloutSection
    from rlhpc.models import read_model
    from rlhpc.reshard.staged.target import WeightTarget
    from rlhpc.rollout.vllm_arguments import ServedModel
    from rlhpc.rollout.vllm_engine import VllmEngine

    section = RolloutSection(kv_cache_gib=0.25, max_num_seqs=REQUESTS)
    engine = VllmEngine(ServedModel(model, read_model(model), "float32", 512), section)
    target, store = WeightTarget(*ends), ends[2].store
    engine.wake_weights()
    store.set("wanted 0", "1")
    target.write(engine, 0)
    engine.wake_cache()
    load = _Load(engine)
    names = ("meanwhile", "polls", "switch", "local", "switch cpu", "local cpu", "transfer", "count")
    found: dict[str, Any] = {name: [] for name in names}
    for _ in range(20):
        load.step()  # the first are slow
    found["alone"] = [load.step() for _ in range(100)]
    for version in range(1, rounds + 1):
        store.set(f"wanted {version}", "1")
        began, steps = time.perf_counter(), []
        while True:
            steps.append(load.step())
            here, seconds = _timed(lambda version=version: target.ready(version))
            found["polls"].append(seconds)
            if here:
                break
        found["transfer"].append(time.perf_counter() - began)
        found["count"].append(len(steps))
        found["meanwhile"] += steps
        copies = _copies(engine)
        for name, write in _in_turn(version, engine, target, copies):
            engine.preempt()
            cpu = time.thread_time()
            found[name].append(_timed(write)[1])
            found[f"{name} cpu"].append(time.thread_time() - cpu)
            for _ in range(10):
                load.step()
    target.close()
    found["publish"] = json.loads(store.get("published"))[1:]
    return found


def _in_turn(version: int, engine: Any, target: Any, copies: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """Both writes; each comes first in every other round."""
    ways = [("switch", lambda: target.write(engine, version)), ("local", lambda: _write(engine, copies))]
    return ways if version % 2 else ways[::-1]


def _copies(engine: Any) -> dict[str, Any]:
    """The engine's parameters as tensors of this process."""
    import torch

    return {name: torch.rand(shape) * 0.02 for name, shape in engine.weight_shapes().items()}


def _write(engine: Any, copies: dict[str, Any]) -> None:
    for name, parameter in engine.open_weights(in_flight=True).items():
        parameter.copy_(copies[name])
    engine.close_weights()


class _Load:
    """Requests with long-tailed lengths, as many in flight as the engine has slots."""

    def __init__(self, engine: Any) -> None:
        import random

        self._engine, self._random, self._key = engine, random.Random(0), 0

    def step(self) -> float:
        """Seconds of one step of the engine."""
        from rlhpc.api import Request

        while self._engine.unfinished < REQUESTS:
            prompt = tuple(self._random.randrange(5, 3990) for _ in range(20))
            length = min(400, int(self._random.lognormvariate(4, 1)) + 1)
            self._engine.submit(self._key, Request(prompt, seed=self._key, max_tokens=length, temperature=1.0))
            self._key += 1
        return _timed(self._engine.step)[1]


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def measure(model: Path, rounds: int) -> dict[str, Any]:
    """Figures of the engine's rank."""
    outputs = rank_outputs("bench.staged_sync", [str(model), rounds], 2, 29873)
    found: dict[str, Any] = json.loads(outputs[1].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        model, rounds = json.loads(options.rank_of)
        rank_main(Path(model), rounds)
    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), options.hidden) / MIB
        found = measure(Path(name), options.rounds)
    print(f"model of {size:,.0f} MiB, {REQUESTS} requests in flight, {options.rounds} syncs")
    for what, name in (
        ("publish, of the trainer", "publish"),
        ("from publish to arrival", "transfer"),
        ("steps alone", "alone"),
        ("steps during a sync", "meanwhile"),
        ("polls", "polls"),
        ("local write and pack", "local"),
        ("local, CPU time", "local cpu"),
        ("switch", "switch"),
        ("switch, CPU time", "switch cpu"),
    ):
        values = found[name]
        print(f"  {what:<26}median {statistics.median(values) * 1e3:8.2f} ms   worst {max(values) * 1e3:8.2f} ms")
    ratio, cpu = (
        statistics.median(found[f"switch{of}"]) / statistics.median(found[f"local{of}"]) for of in ("", " cpu")
    )
    steps = statistics.mean(found["count"])
    print(f"  {steps:.0f} steps during a sync; switch {ratio:.2f} x local write and pack, {cpu:.2f} x in CPU time")
    if max(found["polls"]) > POLL_SECONDS or ratio > SWITCH:
        sys.exit("above the limit")


if __name__ == "__main__":
    main()
