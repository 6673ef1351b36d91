"""Model FLOP/s utilization (MFU) of updates: forward and backward, the optimizer, and time by kernel.

FLOPs come from rlhpc/models/flops.py, without recomputation. They are divided by the data sheet's dense bfloat16 peak
and by the rate of a large matrix product on the same machine. Models are cut to the layers that fit by the planner's
memory model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import rig
from bench.acceptance.process import TRAINER, WorkerCall, run_each
from bench.acceptance.results import Context, Figure, Goal, Skipped
from bench.device_time import GIB, by_kind, free_bytes, kernels, matrix_peak, median_seconds, peak_bytes, reset_peak
from bench.shapes import model_fields, model_shape
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, MoeSection, OptimizerSection, ParallelSection
from rlhpc.models import ModelShape, shape_of
from rlhpc.models.flops import training_flops
from rlhpc.plan.estimates.activations import ActivationSetting
from rlhpc.plan.estimates.hardware import peak_tflops
from rlhpc.plan.estimates.model_memory import MegatronModel
from rlhpc.plan.estimates.rank_memory import Tokens, default_bucket, state_bytes
from rlhpc.sharding.layout import ParallelLayout

DENSE, _EXPERTS = Goal(">=", 0.45), Goal(">=", 0.25)
USABLE = 0.94  # share of the free memory; the rest is lost to fragmentation
_LISTED = 12  # kernels reported by name
# Cheapest first. Feed-forward activations are most of a layer's and cheap to recompute.
RECOMPUTE: tuple[MemorySection, ...] = (
    MemorySection(),
    MemorySection(recompute="selective", recompute_modules=["mlp", "moe"]),
    MemorySection(recompute="full"),
)
Planned = Callable[[ModelShape, int, MemorySection], int]


@dataclass(frozen=True)
class Packing:
    """Sequence lengths of a microbatch, and the number of microbatches per update."""

    label: str
    lengths: tuple[int, ...]
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return sum(self.lengths)

    def operations(self, shape: ModelShape) -> float:
        """FLOPs of an update's forward and backward passes."""
        return training_flops(shape, self.lengths) * self.microbatches


_FULL = (Packing("4k", (2048, 1024, 512, 512), 8), Packing("16k", (8192, 4096, 2048, 1024, 1024), 4))
_TINY = (Packing("64", (32, 16, 8, 8), 2), Packing("128", (64, 32, 16, 16), 2))


def packings(*, tiny: bool) -> Sequence[Packing]:
    """Packings to measure."""
    return _TINY if tiny else _FULL


def planned_bytes(shape: ModelShape, tokens: int, memory: MemorySection) -> int:
    """Peak bytes of an update in bfloat16 on one rank, with microbatches of ``tokens``."""
    layout = ParallelLayout(1)
    state = state_bytes(shape, layout, 0, "bfloat16", bucket=default_bucket(layout))
    in_float32 = shape.experts is not None and shape.experts.float32_router(MoeSection().router_dtype)
    setting = ActivationSetting(shape, layout, ParallelSection(), memory, "bfloat16", float32_router=in_float32)
    model = MegatronModel("actor", setting, 0, state, Tokens(tokens, tokens, 2), trained=True)
    return state.parameters + state.gradients + state.optimizer + model.stored + model.workspace


@dataclass(frozen=True)
class Subject:
    """A model and how its trainer is made. ``ways``: memory settings to try, from the fastest; ``planned``: predicted
    peak of an update."""

    shape: ModelShape
    make: Callable[[ModelShape, str, ModelSettings], Any] = rig.make_actor
    ways: Sequence[MemorySection] = RECOMPUTE
    planned: Planned = planned_bytes

    def fitting(self, tokens: int, limit: int) -> Sequence[MemorySection]:
        """Memory settings from the first whose predicted peak fits; only the last if none does."""
        sizes = [self.planned(self.shape, tokens, memory) for memory in self.ways]
        return self.ways[next((i for i, size in enumerate(sizes) if size <= limit), -1) :]


def most_layers(cut: Callable[[int], ModelShape], tokens: int, limit: int) -> int:
    """Maximum number of layers that train without recomputation within ``limit`` bytes, at least 1.

    ``cut``: shape with a given number of layers; it may return fewer, which ends the search.
    """
    layers = 1
    while cut(layers + 1).num_layers == layers + 1 and planned_bytes(cut(layers + 1), tokens, RECOMPUTE[0]) <= limit:
        layers += 1
    return layers


def run_1_5b(context: Context) -> None:
    """Measure Qwen2.5-1.5B with all layers."""
    _run(context, "1.5b")


def run_8b(context: Context) -> None:
    """Measure Llama-3.1-8B with as many layers as fit."""
    _run(context, "8b")


def run_moe(context: Context) -> None:
    """Measure Qwen3-30B-A3B with as many layers as fit."""
    _run(context, "moe")


def _run(context: Context, model: str) -> None:
    run_each(context, [WorkerCall(model, f"{__name__}:measure", {"model": model}, imports=TRAINER)])


def measure(context: Context, model: str) -> None:
    """Measure a model at every packing in this process."""
    rig.join_ranks()
    sizes = packings(tiny=context.tiny)
    limit = usable_bytes(context)
    shape, note = _shape(context, model, max(size.tokens for size in sizes), limit)
    ceilings = Ceilings.of(context)
    context.report(Figure("layers", shape.num_layers, note=note))
    goal = (_EXPERTS if model == "moe" else DENSE) if not context.tiny else None
    for size in sizes:
        measure_packing(context, Subject(shape), size, limit, ceilings, goal)


def _shape(context: Context, model: str, tokens: int, limit: int) -> tuple[ModelShape, str]:
    """Model shape, with as many layers as fit, and a note on their number."""
    if context.tiny:
        return model_shape("tiny-moe" if model == "moe" else "tiny"), "tiny"
    if model == "1.5b":
        return model_shape(model), "all layers"
    whole = model_shape("30b-a3b" if model == "moe" else model).num_layers
    cut = with_share_of_vocabulary if model == "moe" else lambda layers: model_shape(model, min(layers, whole))
    note = f"of {whole}" + (", with the same share of the vocabulary" if model == "moe" else "")
    return cut(most_layers(cut, tokens, limit)), note


def with_share_of_vocabulary(layers: int) -> ModelShape:
    """30B-A3B with layers and vocabulary cut in proportion: a full head would dominate the FLOPs of few layers."""
    fields = model_fields("30b-a3b")
    whole = fields["num_hidden_layers"]
    layers = min(layers, whole)
    rows = max(64, fields["vocab_size"] * layers // whole // 64 * 64)
    return shape_of({**fields, "num_hidden_layers": layers, "vocab_size": rows}, where="30b-a3b")


@dataclass(frozen=True)
class Ceilings:
    """Peaks in FLOP/s: from the data sheet, None for an unknown device, and measured."""

    data_sheet: float | None
    measured: float

    @classmethod
    def of(cls, context: Context, case: str = "") -> Ceilings:
        """Look up the device and time its matrix product; ``case``: begins the names of both results."""
        import torch

        name, prefix = torch.cuda.get_device_name() if context.on_gpu else "CPU", f"{case}: " if case else ""
        tflops = peak_tflops(name)
        if tflops is None:
            context.report(Skipped(f"{prefix}MFU by the data sheet", f"no known peak for {name}"))
        product = matrix_peak(tiny=context.tiny)
        context.report(Figure(f"{prefix}matrix product", product / 1e12, "TFLOP/s", note="bfloat16, random data"))
        return cls(None if tflops is None else tflops * 1e12, product)


def usable_bytes(context: Context) -> int:
    """Bytes of the GPU that a trainer may take."""
    return int(USABLE * free_bytes()) if context.on_gpu else 0


def measure_packing(
    context: Context, subject: Subject, size: Packing, limit: int, ceilings: Ceilings | None, goal: Goal | None = None
) -> float:
    """Tokens per second with the least recomputation that fits; retries with more after running out of memory.

    Without ceilings only memory is measured.
    """
    import torch

    ways = subject.fitting(size.tokens, limit) if context.on_gpu else subject.ways[:1]
    for number, memory in enumerate(ways):
        try:
            update = _Update(context, subject, size, memory)
            return update.report(ceilings, goal) if ceilings is not None else update.report_peak()
        except torch.OutOfMemoryError:
            if number + 1 == len(ways):
                raise
            context.log(f"{size.label}: out of memory with recompute {memory.recompute!r}")
        gc.collect()
    raise AssertionError("no recomputation setting to try")


class _Update:
    """A trainer and the microbatches of one update, all equal."""

    def __init__(self, context: Context, subject: Subject, size: Packing, memory: MemorySection) -> None:
        from rlhpc.parallel.offload import release_cached

        release_cached()
        self._context, self._subject, self._size, self._memory = context, subject, size, memory
        self._how = "no recomputation" if memory.recompute == "none" else f"recompute {memory.recompute}"
        context.log(f"{size.label}: {subject.shape.num_layers} layers, {self._how}")
        settings = ModelSettings(ParallelSection(), memory, optimizer=OptimizerSection())
        self._actor = subject.make(subject.shape, context.dtype, settings)
        self._batches = [rig.packed_random(subject.shape, size.lengths)] * size.microbatches
        reset_peak()

    def report(self, ceilings: Ceilings, goal: Goal | None) -> float:
        """Measure and report all figures, and return tokens per second."""
        update = median_seconds(self._train, rounds=3, warm_up=2)
        both = median_seconds(lambda: rig.differentiate(self._actor, self._batches), rounds=3, warm_up=1)
        operations = self._size.operations(self._subject.shape)
        tokens = self._size.tokens * self._size.microbatches
        self._figure("forward and backward", both, "s", note=f"{tokens:,} tokens, {self._how}")
        self._figure("optimizer", max(0.0, update - both), "s", note="including clipping")
        self._figure("tokens per second", tokens / update, "1/s")
        if ceilings.data_sheet is not None:
            self._figure("MFU", operations / both / ceilings.data_sheet, goal=goal)
            self._figure("MFU with optimizer", operations / update / ceilings.data_sheet)
        self._figure("MFU of the measured peak", operations / both / ceilings.measured)
        self._report_memory()
        self._report_kernels(both / self._size.microbatches)
        return tokens / update

    def report_peak(self) -> float:
        """Report the memory of two updates alone, which take their time; return 0."""
        for _ in range(2):
            self._train()
        self._report_memory()
        return 0.0

    def _train(self) -> None:
        rig.train(self._actor, self._batches, rate=1e-6)

    def _report_memory(self) -> None:
        if not self._context.on_gpu:
            self._context.report(Skipped(f"{self._size.label}: peak memory", "needs a GPU"))
            return
        planned = self._subject.planned(self._subject.shape, self._size.tokens, self._memory)
        self._figure("peak memory", peak_bytes() / GIB, "GiB", note=self._how)
        self._figure("planned memory", planned / GIB, "GiB")

    def _report_kernels(self, seconds: float) -> None:
        """Report the kernels of one microbatch, which takes ``seconds`` without the profiler."""
        action, on_gpu = lambda: rig.differentiate(self._actor, self._batches[:1]), self._context.on_gpu
        found = kernels(action, on_gpu=on_gpu)
        if not found:
            self._context.report(Skipped(f"{self._size.label}: kernels", "the profiler recorded none"))
            return
        busy = sum(kernel.seconds for kernel in found)
        self._figure("device busy", busy / seconds, note="kernel seconds per wall second of a microbatch")
        for kind, taken in by_kind(found).items():
            self._figure(f"share of {kind}", taken / busy)
        for number, kernel in enumerate(found[:_LISTED], 1):
            note = f"{kernel.calls} calls of {kernel.name[:160]}"
            self._figure(f"kernel {number:02}", kernel.seconds * 1e3, "ms", note=note)

    def _figure(self, name: str, value: float, unit: str = "", goal: Goal | None = None, note: str = "") -> None:
        self._context.report(Figure(f"{self._size.label}: {name}", value, unit, goal, note))
