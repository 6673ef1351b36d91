"""Weight sync within one device: seconds, bandwidth relative to a plain copy, and memory freed by sleep."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from bench.acceptance.part import Context, Figure, Goal, Skipped
from bench.acceptance.parts import rig, timing
from bench.acceptance.workers import BOTH, WorkerCall, run_each
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import ParallelSection

_ROUNDS = 5
_FREED = Goal(">=", 0.95)


@dataclass(frozen=True)
class SyncCase:
    """A shape and the goal of its sync. ``graphs``: with CUDA graphs, whose memory sleep does not free."""

    name: str
    shape: str
    cache_gib: float
    seconds: Goal | None = None
    graphs: bool = False


_FULL = (
    SyncCase("8b", "8b", 8.0, Goal("<", 0.05)),
    SyncCase("1.5b", "1.5b", 4.0, graphs=True),
)
_TINY = (SyncCase("tiny", "tiny", 0.0625, Goal("<", 1.0)),)


def run(context: Context) -> None:
    """Run every case in its own process."""
    run_each(context, [call(case) for case in cases(tiny=context.tiny)])


def cases(*, tiny: bool) -> tuple[SyncCase, ...]:
    """Cases of a size."""
    return _TINY if tiny else _FULL


def call(case: SyncCase) -> WorkerCall:
    """Call that runs one case."""
    return WorkerCall(case.name, f"{__name__}:measure", {"name": case.name}, imports=BOTH)


def measure(context: Context, name: str) -> None:
    """Run one case in this process. Neither side is sharded: every byte is read once and written once."""
    case = next(case for case in cases(tiny=context.tiny) if case.name == name)
    dtype = rig.dtype_of(context)
    folder, shape = rig.model_folder(context.folder / "models" / case.name, case.shape, None, dtype)
    rig.join_ranks()
    actor = rig.make_actor(shape, dtype, ModelSettings(ParallelSection()))
    rig.log_probs(actor, [rig.packed_random(shape, (64, 32))], prompt=1)
    without_engine = 0
    if context.on_gpu:
        without_engine, outside = timing.free_bytes(), timing.outside_pytorch() / timing.GIB
        context.report(Figure(f"{case.name}: libraries", outside, "GiB", note="CUDA context, workspaces, NCCL"))
    context.log("starting the engine")
    engine = rig.make_engine(rig.EngineSpec(folder, shape, dtype, 512, case.cache_gib, 64, graphs=case.graphs))
    manager = rig.make_manager(actor, engine)
    with manager:  # the first sync and the first tokens make all lasting allocations
        engine.generate(rig.requests(shape, 4, 8, 8))
    medians = _phases(engine, manager)
    _report_seconds(context, case, manager.plan.copies, actor.weights.dtype.itemsize, medians)
    if not context.on_gpu:
        context.report(Skipped(f"{case.name}: memory freed by sleep", "needs a GPU"))
        return
    weights = sum(prod(size) for size in engine.weight_shapes().values()) * actor.weights.dtype.itemsize
    _report_memory(context, case, manager, weights, without_engine)


def _phases(engine: Any, manager: Any) -> dict[str, float]:
    """Median seconds of each phase of a weight sync, and of the whole."""
    phases: dict[str, Callable[[], Any]] = {
        "wake, weights": engine.wake_weights,
        "write": manager.write,
        "verify": manager.verify,
        "close": engine.close_weights,
        "wake, cache": engine.wake_cache,
        "sleep": manager.sleep,
    }
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for name, phase in phases.items():
            taken[name].append(timing.seconds(phase))
        taken["whole sync"].append(timing.seconds(manager.sync))
        manager.sleep()
    return {name: statistics.median(each) for name, each in taken.items()}


def _report_seconds(context: Context, case: SyncCase, copies: Any, itemsize: int, medians: dict[str, float]) -> None:
    def report(name: str, value: float, unit: str, goal: Goal | None = None, note: str = "") -> None:
        context.report(Figure(f"{case.name}: {name}", value, unit, goal, note))

    size = sum(copy.box.volume for copy in copies) * itemsize
    bandwidth, copy = 2 * size / medians["write"], timing.copy_bandwidth(tiny=context.tiny)
    report("write", medians["write"], "s", case.seconds, "all weights, from the trainer's memory to the engine's")
    report("weights", size / 1e9, "GB")
    report("bandwidth", bandwidth / 1e9, "GB/s", note="read and written")
    report("bandwidth of a plain copy", copy / 1e9, "GB/s", note="read and written")
    report("share of a plain copy", bandwidth / copy, "")
    for name, value in medians.items():
        if name != "write":
            report(name, value, "s")


def _report_memory(context: Context, case: SyncCase, manager: Any, weights: int, without_engine: int) -> None:
    """Report memory freed by sleep. ``without_engine``: free bytes before the engine started."""
    manager.sync()
    awake = timing.free_bytes()
    manager.sleep()
    asleep = timing.free_bytes()
    held = weights + case.cache_gib * timing.GIB
    note = f"of {held / timing.GIB:.1f} GiB of weights and KV cache"
    share, left = (asleep - awake) / held, (without_engine - asleep) / timing.GIB
    context.report(Figure(f"{case.name}: memory freed by sleep", share, "", _FREED, note))
    note = "library contexts and workspaces" + (" and CUDA graphs" if case.graphs else "")
    context.report(Figure(f"{case.name}: engine asleep", left, "GiB", note=note))
