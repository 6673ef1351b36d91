"""MFU and memory of the same update by others: FSDP2 on one rank, and plain transformers with PyTorch's AdamW.

All have the same model and microbatches, each in a process of its own. Layers of FSDP2 run as transformers has them,
and as graphs of torch.compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench import rig
from bench.acceptance import mfu
from bench.acceptance.process import TRAINER, WorkerCall, run_each
from bench.acceptance.results import Context, Figure, Skipped
from bench.device_time import GIB, free_bytes, median_seconds, peak_bytes, reset_peak
from bench.shapes import model_shape
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import ModelShape
from rlhpc.plan.estimates.fsdp_activations import FsdpSetting
from rlhpc.plan.estimates.fsdp_memory import make_fsdp_model
from rlhpc.plan.estimates.hardware import peak_tflops
from rlhpc.plan.estimates.rank_memory import Tokens
from rlhpc.sharding.mesh_sizes import MeshSizes

_MEGATRON, _EAGER, _COMPILED = "Megatron", "FSDP2", "FSDP2 compiled"
# On a single rank there is nothing to gather or to sum: weights and gradients are copied less often.
_RECOMPUTE_FSDP: tuple[MemorySection, ...] = (
    MemorySection(reshard_after_forward=False, accumulation="keep"),
    MemorySection(reshard_after_forward=False, accumulation="reduce"),
    *(memory.model_copy(update={"accumulation": "reduce"}) for memory in mfu.RECOMPUTE),
)
_PRECISIONS = ("bfloat16", "float32 weights")  # the fastest, and as in rlhpc's optimizer


def planned_fsdp_bytes(shape: ModelShape, tokens: int, memory: MemorySection) -> int:
    """Peak bytes of an update in bfloat16 on one rank of FSDP2, with microbatches of ``tokens``."""
    setting = FsdpSetting(shape, 1, ParallelSection(), memory, "bfloat16")
    model = make_fsdp_model("actor", setting, MeshSizes(), 0, Tokens(tokens, tokens, 2), "adamw")
    state = model.updating_state
    return state.parameters + state.gradients + state.optimizer + sum(model.update_parts.values())


def run_fsdp(context: Context) -> None:
    """Measure Qwen2.5-1.5B with all layers on both back ends, and compare their memory."""
    ways = [_EAGER, _MEGATRON] if context.tiny else [_COMPILED, _MEGATRON, _EAGER]
    if context.tiny:
        context.report(Skipped(_COMPILED, "compiling takes longer than tiny sizes should"))
    fsdp = ("rlhpc.backends.fsdp.fsdp_backend",)
    calls = [
        WorkerCall(way, f"{__name__}:measure_fsdp", {"way": way}, imports=TRAINER if way == _MEGATRON else fsdp)
        for way in ways
    ]
    peaks = {way: ranks[0] if ranks else {} for way, ranks in zip(ways, run_each(context, calls), strict=True)}
    megatron = peaks.pop(_MEGATRON)
    for way, found in peaks.items():
        for label in [label for label in found if label in megatron]:
            context.report(Figure(f"{label}: peak memory, {way} / Megatron", found[label] / megatron[label]))


def measure_fsdp(context: Context, way: str) -> dict[str, float]:
    """Measure one way at every packing in this process: Megatron's memory, FSDP2's memory and time. Returns peak bytes
    by packing, none without a GPU."""
    (rig.join_ranks if way == _MEGATRON else rig.join_world)()
    folder, shape = rig.model_folder(context.folder / "models" / way, _name(context), None, context.dtype)
    limit, ceilings = mfu.usable_bytes(context), None if way == _MEGATRON else mfu.Ceilings.of(context, way)
    subject = mfu.Subject(shape)
    if way != _MEGATRON:
        make = partial(rig.make_fsdp_actor, folder, compiled=way == _COMPILED)
        subject = mfu.Subject(shape, make, _RECOMPUTE_FSDP, planned_fsdp_bytes)
    goal = mfu.DENSE if way == _COMPILED and not context.tiny else None
    peaks = {}
    for size in mfu.packings(tiny=context.tiny):
        mfu.measure_packing(context, subject, replace(size, label=f"{way}, {size.label}"), limit, ceilings, goal)
        if context.on_gpu:
            peaks[size.label] = float(peak_bytes())
    return peaks


def run_peer(context: Context) -> None:
    """Measure Qwen2.5-1.5B in rlhpc and in transformers, on the same rows."""
    calls = [
        WorkerCall("rlhpc", f"{__name__}:measure_beside_peer", imports=TRAINER),
        WorkerCall("transformers", f"{__name__}:measure_peer", imports=("torch", "transformers")),
    ]
    ours, theirs = ({} if ranks is None else ranks[0] for ranks in run_each(context, calls))
    for label, rate in ours.items():
        for name, peers in theirs.items():
            if name.endswith(label):
                context.report(Figure(f"rlhpc / {name}", rate / peers, note="tokens per second"))


def rows(*, tiny: bool) -> Sequence[mfu.Packing]:
    """Sizes at which rlhpc and transformers are measured: rows of equal length, which need no padding in either."""
    if tiny:
        return (mfu.Packing("2 x 32", (32,) * 2, 2),)
    return (mfu.Packing("1 x 4k", (4096,), 8), mfu.Packing("4 x 4k", (4096,) * 4, 4))


def _name(context: Context) -> str:
    return "tiny" if context.tiny else "1.5b"


def measure_beside_peer(context: Context) -> dict[str, float]:
    """Measure rlhpc in this process; tokens per second by size."""
    rig.join_ranks()
    limit = mfu.usable_bytes(context)
    subject, ceilings, rates = mfu.Subject(model_shape(_name(context))), mfu.Ceilings.of(context), {}
    for size in rows(tiny=context.tiny):
        named = replace(size, label=f"rlhpc, {size.label}")
        rates[size.label] = mfu.measure_packing(context, subject, named, limit, ceilings)
    return rates


def measure_peer(context: Context) -> dict[str, float]:
    """Measure transformers at every size in both precisions in this process; tokens per second of those that fit."""
    import torch

    rates: dict[str, float] = {}
    folder, _ = rig.model_folder(context.folder / "models" / "peer", _name(context), None, "float32")
    for precision in _PRECISIONS:
        for size in rows(tiny=context.tiny):
            named = replace(size, label=f"transformers, {precision}, {size.label}")
            context.log(named.label)
            if context.on_gpu:
                free_bytes()  # empties PyTorch's cache
            reset_peak()
            try:
                step = _step(folder, named, plain=precision == "bfloat16", on_gpu=context.on_gpu)
                rates[named.label] = _measure(context, step, named)
            except torch.OutOfMemoryError:
                context.report(Skipped(named.label, "out of memory"))
    return rates


def _measure(context: Context, step: Callable[[], Any], size: mfu.Packing) -> float:
    import torch

    seconds = median_seconds(step, rounds=3, warm_up=2)
    tokens = size.tokens * size.microbatches
    note = f"{tokens:,} tokens, {_attention()} attention"
    context.report(Figure("update", seconds, "s", note=note).of(size.label))
    context.report(Figure("tokens per second", tokens / seconds, "1/s").of(size.label))
    if context.on_gpu:
        peak = peak_tflops(torch.cuda.get_device_name())
        if peak is not None:
            share = size.operations(model_shape(_name(context))) / seconds / peak / 1e12
            context.report(Figure("MFU with optimizer", share).of(size.label))
        context.report(Figure("peak memory", peak_bytes() / GIB, "GiB").of(size.label))
    return tokens / seconds


def _step(folder: Any, size: mfu.Packing, *, plain: bool, on_gpu: bool) -> Callable[[], None]:
    """One update: forward and backward of every microbatch, clipping, and AdamW."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    with device:
        config = AutoConfig.from_pretrained(folder)
        dtype = torch.bfloat16 if plain else torch.float32
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(config, dtype=dtype, attn_implementation=_attention())
        tokens = torch.randint(0, config.vocab_size, (len(size.lengths), size.lengths[0]))
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    autocast = contextlib.nullcontext() if plain else torch.autocast(device.type, torch.bfloat16)

    def step() -> None:
        for _ in range(size.microbatches):
            with autocast:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / size.microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step


def _attention() -> str:
    return "flash_attention_2" if find_spec("flash_attn") else "sdpa"
