"""FSDP2 on one rank: MFU of updates of a whole model, and their peak memory against Megatron's.

Both back ends have the same model, weights and microbatches, each in a process of its own. Layers of FSDP2 run as
transformers has them, and as graphs of torch.compile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.acceptance.part import Context, Figure, Skipped
from bench.acceptance.parts import rig, timing
from bench.acceptance.parts.fit import RECOMPUTE_FSDP, planned_fsdp_bytes
from bench.acceptance.parts.mfu import DENSE, Ceilings, Subject, measure_packing, packings, usable_bytes
from bench.acceptance.workers import TRAINER, WorkerCall, run_each

_FSDP = ("rlhpc.backends.fsdp.fsdp_backend",)
_MEGATRON, _EAGER, _COMPILED = "Megatron", "FSDP2", "FSDP2 compiled"


def run(context: Context) -> None:
    """Measure Qwen2.5-1.5B with all layers on both back ends, and compare their memory."""
    ways = [_EAGER, _MEGATRON] if context.tiny else [_COMPILED, _MEGATRON, _EAGER]
    if context.tiny:
        context.report(Skipped(_COMPILED, "compiling takes longer than tiny sizes should"))
    calls = [call(way) for way in ways]
    peaks = {way: ranks[0] for way, ranks in zip(ways, run_each(context, calls), strict=True) if ranks is not None}
    for way in ways:
        for label, peak in peaks.get(way, {}).items() if way != _MEGATRON else ():
            if label in peaks.get(_MEGATRON, {}):
                ratio = peak / peaks[_MEGATRON][label]
                context.report(Figure(f"{label}: peak memory, {way} / Megatron", ratio))


def call(way: str) -> WorkerCall:
    """Call that measures one of the ways."""
    return WorkerCall(way, f"{__name__}:measure", {"way": way}, imports=TRAINER if way == _MEGATRON else _FSDP)


def measure(context: Context, way: str) -> dict[str, float]:
    """Measure one way at every packing in this process: Megatron's memory, FSDP2's memory and time. Returns peak bytes
    by packing, none without a GPU."""
    (rig.join_ranks if way == _MEGATRON else rig.join_world)()
    folder, shape = rig.model_folder(
        context.folder / "models" / way, "tiny" if context.tiny else "1.5b", None, rig.dtype_of(context)
    )
    limit, ceilings = usable_bytes(context), None if way == _MEGATRON else Ceilings.of(context, way)
    subject = Subject(shape)
    if way != _MEGATRON:
        make = partial(rig.make_fsdp_actor, folder, compiled=way == _COMPILED)
        subject = Subject(shape, make, RECOMPUTE_FSDP, planned_fsdp_bytes)
    goal = DENSE if way == _COMPILED and not context.tiny else None
    peaks = {}
    for size in packings(tiny=context.tiny):
        named = replace(size, label=f"{way}, {size.label}")
        measure_packing(context, subject, named, limit, ceilings, goal)
        if context.on_gpu:
            peaks[size.label] = float(timing.peak_bytes())
    return peaks
