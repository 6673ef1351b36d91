"""Weights within one device: engine and trainer agree after each sync, and its seconds, bandwidth and memory.

A case of correctness trains and syncs twice, comparing the log-probs of both sides after each sync. It trains first on
random tokens, then on its own responses. Each case has its own process and engine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from bench import rig
from bench.acceptance.process import BOTH, WorkerCall, run_each, run_lanes
from bench.acceptance.results import IS_TRUE, Context, Figure, Goal, Skipped
from bench.device_time import GIB, copy_bandwidth, free_bytes, seconds
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, MoeSection, OffloadSection, OptimizerSection, ParallelSection

_EXACT = 1e-4  # bound of log-prob differences in float32 on a CPU
_VISIBLE_CHANGE = 0.05  # minimum change of log-probs by an update; stale weights in an engine would show as much
_FREED_SHARED = 0.9  # minimum share of the shared bytes that must become free
_FREED = Goal(">=", 0.95)
_ROUNDS = 5


@dataclass(frozen=True)
class CorrectnessCase:
    """A model and its variants of training and weight sync.

    ``layers``: None for all. ``tolerance``: bound of the mean log-prob difference in bfloat16, about twice the rounding
    error of as many layers on a CPU; a zeroed projection in one layer gives 0.1.
    """

    name: str
    shape: str
    layers: int | None
    tiny: str
    variants: tuple[str, ...]
    tolerance: float
    graphs: bool = False


# Most informative first. Only one engine compiles and captures CUDA graphs, which takes a minute. Routers of random
# models choose between near-equal experts, so rounding sends tokens of trainer and engine to different experts. All
# but the dense model have a small vocabulary, since two cases share the GPU.
CASES = (
    CorrectnessCase("dense", "1.5b", None, "tiny", ("resident", "offload"), 0.03, graphs=True),
    CorrectnessCase("moe", "30b-a3b", 2, "tiny-moe", ("resident",), 0.05),
    CorrectnessCase("mla", "16b-a3b-mla", 2, "tiny-mla", ("resident",), 0.05),
    CorrectnessCase("routed experts", "30b-a3b", 2, "tiny-moe", ("replay",), 0.03),
    CorrectnessCase("optimizer offload", "1.5b", 4, "tiny", ("optimizer offload",), 0.02),
    CorrectnessCase("shared weights", "8b", 4, "tiny", ("shared",), 0.02),
)
_VOCABULARY = 16384


def run_correctness(context: Context) -> None:
    """Run every case: the dense one, which takes longest, concurrently with the others but the last, which reads the
    GPU's free memory."""
    dense, *others, alone = (
        WorkerCall(case.name, f"{__name__}:check", {"name": case.name}, imports=BOTH) for case in CASES
    )
    run_lanes(context, [[dense], others])
    run_each(context, [alone])


def check(context: Context, name: str) -> None:
    """Run one case in this process."""
    rig.join_ranks()
    case = next(case for case in CASES if case.name == name)
    checks = _Checks(context, case)
    for variant in case.variants:
        checks.run(variant)


class _Checks:
    """A running case: the engine shared by its variants, and the requests that it answers."""

    def __init__(self, context: Context, case: CorrectnessCase) -> None:
        self._context, self._case = context, case
        folder = context.folder / "models" / case.name.replace(" ", "-")
        name, layers = (case.tiny, None) if context.tiny else (case.shape, case.layers)
        cut = {} if context.tiny or case.layers is None else {"vocab_size": _VOCABULARY}
        self._folder, self._shape = rig.model_folder(folder, name, layers, context.dtype, **cut)
        self._requests, self._prompt, self._response = (4, 12, 12) if context.tiny else (32, 64, 96)
        self._trained = (24, 9, 15) if context.tiny else (1024, 640, 384)  # lengths of the first update's sequences
        self._asked = rig.requests(self._shape, self._requests, self._prompt, self._response)
        self._engine: Any = None

    def run(self, variant: str) -> None:
        """Train and sync twice, with the variant's own checks in between."""
        from rlhpc.parallel.offload import release_cached

        self._context.log(f"{variant}: training")
        release_cached()  # of the previous variant's trainer
        offload = OffloadSection(parameters=True, gradients=True, optimizer=True)
        settings = ModelSettings(
            ParallelSection(),
            MemorySection(offload=offload) if variant == "offload" else MemorySection(),
            MoeSection(router_replay=variant == "replay"),
            OptimizerSection(optimizer_offload_fraction=0.5 if variant == "optimizer offload" else 0.0),
        )
        actor = rig.make_actor(self._shape, self._context.dtype, settings)
        applied = [rig.train(actor, [rig.packed_random(self._shape, self._trained)]).applied]
        self._make_engine(routed_experts=variant == "replay")
        manager = rig.make_manager(actor, self._engine, share_weights=variant == "shared")
        if variant == "shared":
            self._check_sharing(actor, manager)
        responses, before = self._sync(f"{variant}, sync 1", actor, manager)
        if variant == "optimizer offload":
            self._check_save(actor, responses)
        applied.append(rig.train(actor, responses).applied)
        change, _ = rig.differences(rig.log_probs(actor, responses, self._prompt), before)
        self._report(f"{variant}, change by training", change, goal=Goal(">", _VISIBLE_CHANGE))
        self._sync(f"{variant}, sync 2", actor, manager)
        self._report(f"{variant}, updates applied", all(applied), goal=IS_TRUE)

    def _make_engine(self, *, routed_experts: bool) -> None:
        if self._engine is not None:
            return
        self._context.log("starting the engine")
        cache_gib, graphs = 0.0625 if self._context.tiny else 1.0, self._case.graphs
        section = {"kv_cache_gib": cache_gib, "max_num_seqs": self._requests, "cuda_graphs": graphs}
        tokens, dtype = self._prompt + self._response, self._context.dtype
        self._engine = rig.make_engine(
            self._folder, self._shape, dtype, tokens, routed_experts=routed_experts, **section
        )

    def _sync(self, label: str, actor: Any, manager: Any) -> tuple[list[Any], list[Any]]:
        """Sync weights, generate and compare; return the responses in batches and the trainer's log-probs of them."""
        manager.sync()
        answered = self._engine.generate(self._asked)
        error = rig.verification_error(manager)
        self._report(f"{label}, weights equal", not error, goal=IS_TRUE, note=error)
        manager.sleep()
        responses = rig.packed_responses(self._asked, answered, tokens=2048)
        ours = rig.log_probs(actor, responses, self._prompt)
        mean, largest = rig.differences(ours, [completion.log_probs for completion in answered])
        limit = self._case.tolerance if self._context.on_gpu else _EXACT
        self._report(f"{label}, logprob_diff_mean", mean, goal=Goal("<", limit))
        self._report(f"{label}, logprob_diff_max", largest)
        return responses, ours

    def _check_sharing(self, actor: Any, manager: Any) -> None:
        """Compare device memory while the engine is awake, with its own weights and with the trainer's."""
        itemsize = actor.weights.dtype.itemsize
        sizes = {name: prod(shape) * itemsize for name, shape in self._engine.weight_shapes().items()}
        common = sum(sizes[name] for name in manager.shared_parameters)
        self._report("share of weights shared", common / sum(sizes.values()), goal=Goal(">", 0.0))
        if not self._context.on_gpu:
            reason = "CPU memory is not split between trainer and engine"
            self._context.report(Skipped(f"{self._case.name}: memory freed by sharing", reason))
            return
        free = []
        for each in (rig.make_manager(actor, self._engine), manager):
            each.sync()
            free.append(free_bytes())
            each.sleep()
        freed = free[1] - free[0]
        self._report("memory freed by sharing", freed / GIB, "GiB")
        # Tiny weights are smaller than a page of the driver.
        goal = None if self._context.tiny else Goal(">=", _FREED_SHARED)
        self._report("freed share of the shared weights", freed / common, goal=goal)

    def _check_save(self, actor: Any, responses: Sequence[Any]) -> None:
        """Check that a checkpoint written in the background of training holds the state at its start."""
        from rlhpc.backends.megatron import end_writers

        folder = self._context.folder / "checkpoint"
        folder.mkdir()
        before = _bits(actor)
        writing = actor.save(folder, asynchronous=True)
        for _ in range(2):
            rig.train(actor, responses)
        changed = _bits(actor) != before
        writing.finish()
        actor.load(folder)
        self._report("asynchronous save, state equal", changed and _bits(actor) == before, goal=IS_TRUE)
        end_writers()

    def _report(self, name: str, value: Any, unit: str = "", goal: Goal | None = None, note: str = "") -> None:
        self._context.report(Figure(f"{self._case.name}: {name}", value, unit, goal, note))


def _bits(actor: Any) -> list[int]:
    """Sum over the bits of each weight and each tensor of the optimizer state."""
    import torch

    from rlhpc.backends.megatron.optimizer import inner_optimizers

    states = [own for optimizer in inner_optimizers(actor.optimizer) for own in optimizer.state.values()]
    tensors = [*actor.weights.parameters(), *(value for own in states for value in own.values())]
    words = {2: torch.int16, 4: torch.int32}
    return [int(t.detach().reshape(-1).view(words[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]


# ---- seconds, bandwidth and memory


@dataclass(frozen=True)
class SyncCase:
    """A shape and the goal of its sync. ``graphs``: with CUDA graphs, whose memory sleep does not free."""

    shape: str
    cache_gib: float
    seconds: Goal | None = None
    graphs: bool = False


_FULL = (SyncCase("8b", 8.0, Goal("<", 0.05)), SyncCase("1.5b", 4.0, graphs=True))
_TINY = (SyncCase("tiny", 0.0625, Goal("<", 1.0)),)


def run_sync(context: Context) -> None:
    """Run every case in its own process."""
    shapes = [case.shape for case in (_TINY if context.tiny else _FULL)]
    run_each(context, [WorkerCall(name, f"{__name__}:measure", {"shape": name}, imports=BOTH) for name in shapes])


def measure(context: Context, shape: str) -> None:
    """Run one case in this process. Neither side is sharded: every byte is read once and written once."""
    import torch

    case = next(case for case in (*_TINY, *_FULL) if case.shape == shape)
    folder, model = rig.model_folder(context.folder / "models" / case.shape, case.shape, None, context.dtype)
    rig.join_ranks()
    actor = rig.make_actor(model, context.dtype, ModelSettings(ParallelSection()))
    rig.log_probs(actor, [rig.packed_random(model, (64, 32))], prompt=1)
    without_engine = 0
    if context.on_gpu:
        without_engine = free_bytes()
        outside = torch.cuda.mem_get_info()[1] - without_engine - torch.cuda.memory_reserved()
        note = "CUDA context, workspaces, NCCL"
        context.report(Figure(f"{case.shape}: libraries", outside / GIB, "GiB", note=note))
    context.log("starting the engine")
    section = {"kv_cache_gib": case.cache_gib, "max_num_seqs": 64, "cuda_graphs": case.graphs}
    engine = rig.make_engine(folder, model, context.dtype, 512, **section)
    manager = rig.make_manager(actor, engine)
    with manager:  # the first sync and the first tokens make all lasting allocations
        engine.generate(rig.requests(model, 4, 8, 8))
    itemsize = actor.weights.dtype.itemsize
    _report_seconds(context, case, sum(copy.box.volume for copy in manager.plan.copies) * itemsize, engine, manager)
    if not context.on_gpu:
        context.report(Skipped(f"{case.shape}: memory freed by sleep", "needs a GPU"))
        return
    weights = sum(prod(size) for size in engine.weight_shapes().values()) * itemsize
    _report_memory(context, case, manager, weights, without_engine)


def _report_seconds(context: Context, case: SyncCase, size: int, engine: Any, manager: Any) -> None:
    """Report median seconds of each phase of a weight sync of ``size`` bytes, and of the whole."""
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
            taken[name].append(seconds(phase))
        taken["whole sync"].append(seconds(manager.sync))
        manager.sleep()
    medians = {name: statistics.median(each) for name, each in taken.items()}
    write = medians.pop("write")
    bandwidth, copy = 2 * size / write, copy_bandwidth(tiny=context.tiny)
    note, both = "all weights, from the trainer's memory to the engine's", "read and written"
    for figure in (
        Figure("write", write, "s", case.seconds, note),
        Figure("weights", size / 1e9, "GB"),
        Figure("bandwidth", bandwidth / 1e9, "GB/s", note=both),
        Figure("bandwidth of a plain copy", copy / 1e9, "GB/s", note=both),
        Figure("share of a plain copy", bandwidth / copy),
        *(Figure(name, value, "s") for name, value in medians.items()),
    ):
        context.report(figure.of(case.shape))


def _report_memory(context: Context, case: SyncCase, manager: Any, weights: int, without_engine: int) -> None:
    """Report memory freed by sleep. ``without_engine``: free bytes before the engine started."""
    manager.sync()
    awake = free_bytes()
    manager.sleep()
    asleep = free_bytes()
    held = weights + case.cache_gib * GIB
    note = f"of {held / GIB:.1f} GiB of weights and KV cache"
    context.report(Figure(f"{case.shape}: memory freed by sleep", (asleep - awake) / held, "", _FREED, note))
    note = "library contexts and workspaces" + (" and CUDA graphs" if case.graphs else "")
    context.report(Figure(f"{case.shape}: engine asleep", (without_engine - asleep) / GIB, "GiB", note=note))
