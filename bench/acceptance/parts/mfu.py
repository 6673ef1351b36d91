"""Model FLOP/s utilization (MFU) of updates: forward and backward, the optimizer, and time by kernel.

FLOPs come from rlhpc/models/flops.py, without recomputation. They are divided by the data sheet's dense bfloat16 peak
and by the rate of a large matrix product on the same machine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.acceptance.part import Context, Figure, Goal, Skipped
from bench.acceptance.parts import rig, timing
from bench.acceptance.parts.breakdown import by_kind, kernels
from bench.acceptance.parts.fit import RECOMPUTE, Planned, most_layers, planned_bytes, recomputations
from bench.acceptance.parts.models import model_fields, model_shape
from bench.acceptance.workers import TRAINER, WorkerCall, run_each
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, OptimizerSection, ParallelSection
from rlhpc.models import ModelShape, shape_of
from rlhpc.models.flops import training_flops
from rlhpc.plan.estimates.hardware import peak_tflops

DENSE, _EXPERTS = Goal(">=", 0.45), Goal(">=", 0.25)
USABLE = 0.94  # share of the free memory; the rest is lost to fragmentation
_LISTED = 12  # kernels reported by name


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


_FULL = (
    Packing("4k", (2048, 1024, 512, 512), 8),
    Packing("16k", (8192, 4096, 2048, 1024, 1024), 4),
)
_TINY = (Packing("64", (32, 16, 8, 8), 2), Packing("128", (64, 32, 16, 16), 2))


@dataclass(frozen=True)
class Subject:
    """A model and how its trainer is made. ``ways``: memory settings to try, from the fastest; ``planned``: predicted
    peak of an update."""

    shape: ModelShape
    make: Callable[[ModelShape, str, ModelSettings], Any] = rig.make_actor
    ways: Sequence[MemorySection] = RECOMPUTE
    planned: Planned = planned_bytes


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
    run_each(context, [call(model)])


def call(model: str) -> WorkerCall:
    """Call that measures a model."""
    return WorkerCall(model, f"{__name__}:measure", {"model": model}, imports=TRAINER)


def packings(*, tiny: bool) -> Sequence[Packing]:
    """Packings to measure."""
    return _TINY if tiny else _FULL


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
    if model == "8b":
        whole = model_shape(model).num_layers
        layers = most_layers(lambda count: model_shape(model, min(count, whole)), tokens, limit)
        return model_shape(model, layers), f"of {whole}"
    whole = model_shape("30b-a3b").num_layers
    layers = most_layers(_with_share_of_vocabulary, tokens, limit)
    return _with_share_of_vocabulary(layers), f"of {whole}, with the same share of the vocabulary"


def _with_share_of_vocabulary(layers: int) -> ModelShape:
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
        product = timing.matrix_peak(tiny=context.tiny)
        context.report(Figure(f"{prefix}matrix product", product / 1e12, "TFLOP/s", note="bfloat16, random data"))
        return cls(None if tflops is None else tflops * 1e12, product)


def usable_bytes(context: Context) -> int:
    """Bytes of the GPU that a trainer may take."""
    return int(USABLE * timing.free_bytes()) if context.on_gpu else 0


def measure_packing(
    context: Context, subject: Subject, size: Packing, limit: int, ceilings: Ceilings | None, goal: Goal | None = None
) -> float:
    """Tokens per second with the least recomputation that fits; retries with more after running out of memory.

    Without ceilings only memory is measured.
    """
    import torch

    ways: Sequence[MemorySection] = subject.ways[:1]
    if context.on_gpu:
        ways = recomputations(subject.shape, size.tokens, limit, subject.planned, subject.ways)
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
        from rlhpc.parallel.device_memory import release_cached

        release_cached()
        shape = subject.shape
        self._context, self._shape, self._size, self._memory = context, shape, size, memory
        context.log(f"{size.label}: {shape.num_layers} layers, recompute {memory.recompute}")
        settings = ModelSettings(ParallelSection(), memory, optimizer=OptimizerSection())
        self._actor, self._planned = subject.make(shape, rig.dtype_of(context), settings), subject.planned
        self._batch = rig.packed_random(shape, size.lengths)

    def report(self, ceilings: Ceilings, goal: Goal | None) -> float:
        """Measure and report all figures, and return tokens per second."""
        self._reset_peak()
        forward_backward, update = self._seconds()
        operations = self._size.operations(self._shape)
        tokens = self._size.tokens * self._size.microbatches
        self._figure("forward and backward", forward_backward, "s", note=f"{tokens:,} tokens, {self._how}")
        self._figure("optimizer", max(0.0, update - forward_backward), "s", note="including clipping")
        self._figure("tokens per second", tokens / update, "1/s")
        if ceilings.data_sheet is not None:
            self._figure("MFU", operations / forward_backward / ceilings.data_sheet, goal=goal)
            self._figure("MFU with optimizer", operations / update / ceilings.data_sheet)
        self._figure("MFU of the measured peak", operations / forward_backward / ceilings.measured)
        self._report_memory()
        self._report_kernels(forward_backward / self._size.microbatches)
        return tokens / update

    def report_peak(self) -> float:
        """Report the memory of two updates alone, which take their time; return 0."""
        self._reset_peak()
        for _ in range(2):
            rig.train(self._actor, [self._batch] * self._size.microbatches, rate=1e-6)
        self._report_memory()
        return 0.0

    def _seconds(self) -> tuple[float, float]:
        """Seconds of forward and backward of all microbatches, and of the whole update."""
        batches = [self._batch] * self._size.microbatches
        tokens = rig.denominator_of(batches)

        def differentiate() -> None:
            self._actor.differentiate(batches, rig.likelihood_loss, tokens, temperature=1.0)

        def update() -> None:
            rig.train(self._actor, batches, rate=1e-6)

        whole = timing.median_seconds(update, rounds=3, warm_up=2)
        return timing.median_seconds(differentiate, rounds=3, warm_up=1), whole

    def _reset_peak(self) -> None:
        import torch

        if self._context.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def _report_memory(self) -> None:
        if not self._context.on_gpu:
            self._context.report(Skipped(f"{self._size.label}: peak memory", "needs a GPU"))
            return
        planned = self._planned(self._shape, self._size.tokens, self._memory)
        self._figure("peak memory", timing.peak_bytes() / timing.GIB, "GiB", note=self._how)
        self._figure("planned memory", planned / timing.GIB, "GiB")

    def _report_kernels(self, seconds: float) -> None:
        """Report the kernels of one microbatch, which takes ``seconds`` without the profiler."""
        tokens = rig.denominator_of([self._batch])

        def action() -> None:
            self._actor.differentiate([self._batch], rig.likelihood_loss, tokens, temperature=1.0)

        found = kernels(action, on_gpu=self._context.on_gpu)
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

    @property
    def _how(self) -> str:
        return "no recomputation" if self._memory.recompute == "none" else f"recompute {self._memory.recompute}"

    def _figure(self, name: str, value: float, unit: str = "", goal: Goal | None = None, note: str = "") -> None:
        self._context.report(Figure(f"{self._size.label}: {name}", value, unit, goal, note))


# ---- the same update in plain transformers


@dataclass(frozen=True)
class PeerSize:
    """Rows of equal length, which need no padding in either system."""

    label: str
    rows: int
    length: int
    microbatches: int


_PEER_FULL = (PeerSize("1 x 4k", 1, 4096, 8), PeerSize("4 x 4k", 4, 4096, 4))
_PEER_TINY = (PeerSize("2 x 32", 2, 32, 2),)


def run_peer(context: Context) -> None:
    """Measure Qwen2.5-1.5B in rlhpc and in transformers, on the same rows."""
    calls = [
        WorkerCall("rlhpc", f"{__name__}:measure_beside_peer", imports=TRAINER),
        WorkerCall("transformers", "bench.acceptance.parts.peer:measure", imports=("torch", "transformers")),
    ]
    ours, theirs = ({} if ranks is None else ranks[0] for ranks in run_each(context, calls))
    for label, rate in ours.items():
        for name, peers in theirs.items():
            if name.endswith(label):
                context.report(Figure(f"rlhpc / {name}", rate / peers, note="tokens per second"))


def peer_sizes(*, tiny: bool) -> Sequence[PeerSize]:
    """Sizes at which both systems are measured."""
    return _PEER_TINY if tiny else _PEER_FULL


def measure_beside_peer(context: Context) -> dict[str, float]:
    """Measure rlhpc in this process; tokens per second by size."""
    rig.join_ranks()
    limit = usable_bytes(context)
    shape, ceilings, rates = model_shape("tiny" if context.tiny else "1.5b"), Ceilings.of(context), {}
    for size in peer_sizes(tiny=context.tiny):
        packing = Packing(f"rlhpc, {size.label}", (size.length,) * size.rows, size.microbatches)
        rates[size.label] = measure_packing(context, Subject(shape), packing, limit, ceilings)
    return rates
