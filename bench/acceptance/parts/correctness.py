"""Correctness: trains and syncs weights twice, comparing the log-probs of engine and trainer after each sync.

Each case has its own process and engine. It trains first on random tokens, then on its own responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from bench.acceptance.part import IS_TRUE, Context, Figure, Goal, Skipped
from bench.acceptance.workers import BOTH, WorkerCall, run_each, run_lanes

from bench.acceptance.parts import rig, timing
from rlhpc.config.model_settings import ModelSettings
from rlhpc.config.training import MemorySection, MoeSection, OffloadSection, OptimizerSection, ParallelSection

_EXACT = 1e-4  # bound of log-prob differences in float32 on a CPU
_VISIBLE_CHANGE = 0.05  # minimum change of log-probs by an update; stale weights in an engine would show as much
_FREED = 0.9  # minimum share of the shared bytes that must become free


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
_ALONE = "shared weights"  # reads the GPU's free memory
_VOCABULARY = 16384


@dataclass(frozen=True)
class _Sizes:
    requests: int
    prompt: int
    response: int
    trained: tuple[int, ...]  # lengths of the first update's sequences
    cache_gib: float


def run(context: Context) -> None:
    """Run every case in its own process: the dense one, which takes longest, concurrently with the others."""
    calls = {case.name: call(case) for case in CASES}
    alone, dense = calls.pop(_ALONE), calls.pop("dense")
    run_lanes(context, [[dense], list(calls.values())])
    run_each(context, [alone])


def call(case: CorrectnessCase) -> WorkerCall:
    """Call that runs one case."""
    return WorkerCall(case.name, f"{__name__}:check", {"name": case.name}, imports=BOTH)


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
        self._dtype = rig.dtype_of(context)
        folder = context.folder / "models" / case.name.replace(" ", "-")
        name, layers = (case.tiny, None) if context.tiny else (case.shape, case.layers)
        cut = {} if context.tiny or case.layers is None else {"vocab_size": _VOCABULARY}
        self._folder, self._shape = rig.model_folder(folder, name, layers, self._dtype, **cut)
        self._sizes = _Sizes(4, 12, 12, (24, 9, 15), 0.0625)
        if not context.tiny:
            self._sizes = _Sizes(32, 64, 96, (1024, 640, 384), 1.0)
        sizes = self._sizes
        self._asked = rig.requests(self._shape, sizes.requests, sizes.prompt, sizes.response)
        self._engine: Any = None

    def run(self, variant: str) -> None:
        """Train and sync twice, with the variant's own checks in between."""
        from rlhpc.parallel.offload import release_cached

        self._context.log(f"{variant}: training")
        release_cached()  # of the previous variant's trainer
        optimizer_offload_fraction = 0.5 if variant == "optimizer offload" else 0.0
        offload = OffloadSection(parameters=True, gradients=True, optimizer=True)
        settings = ModelSettings(
            ParallelSection(),
            MemorySection(offload=offload) if variant == "offload" else MemorySection(),
            MoeSection(router_replay=variant == "replay"),
            OptimizerSection(optimizer_offload_fraction=optimizer_offload_fraction),
        )
        actor = rig.make_actor(self._shape, self._dtype, settings)
        batches = [rig.packed_random(self._shape, self._sizes.trained)]
        applied = [rig.train(actor, batches).applied]
        self._make_engine(routed_experts=variant == "replay")
        manager = rig.make_manager(actor, self._engine, share_weights=variant == "shared")
        if variant == "shared":
            self._check_sharing(actor, manager)
        responses, before = self._sync(f"{variant}, sync 1", actor, manager)
        if variant == "optimizer offload":
            self._check_save(actor, responses)
        applied.append(rig.train(actor, responses).applied)
        change, _ = rig.differences(rig.log_probs(actor, responses, self._sizes.prompt), before)
        self._report(f"{variant}, change by training", change, goal=Goal(">", _VISIBLE_CHANGE))
        self._sync(f"{variant}, sync 2", actor, manager)
        self._report(f"{variant}, updates applied", all(applied), goal=IS_TRUE)

    def _make_engine(self, *, routed_experts: bool) -> None:
        if self._engine is not None:
            return
        self._context.log("starting the engine")
        spec = rig.EngineSpec(
            self._folder,
            self._shape,
            self._dtype,
            context_tokens=self._sizes.prompt + self._sizes.response,
            cache_gib=self._sizes.cache_gib,
            max_num_seqs=self._sizes.requests,
            graphs=self._case.graphs,
            routed_experts=routed_experts,
        )
        self._engine = rig.make_engine(spec)

    def _sync(self, label: str, actor: Any, manager: Any) -> tuple[list[Any], list[Any]]:
        """Sync weights, generate and compare; return the responses in batches and the trainer's log-probs of them."""
        manager.sync()
        answered = self._engine.generate(self._asked)
        self._check_weights(label, manager)
        manager.sleep()
        responses = rig.packed_responses(self._asked, answered, tokens=2048)
        ours = rig.log_probs(actor, responses, self._sizes.prompt)
        mean, largest = rig.differences(ours, [completion.log_probs for completion in answered])
        limit = self._case.tolerance if self._context.on_gpu else _EXACT
        self._report(f"{label}, logprob_diff_mean", mean, goal=Goal("<", limit))
        self._report(f"{label}, logprob_diff_max", largest)
        return responses, ours

    def _check_weights(self, label: str, manager: Any) -> None:
        """Write the weights again and compare the checksums of both sides, which detect a single wrong bit."""
        from rlhpc.core.errors import ReshardError

        note = ""
        manager.write()
        try:
            manager.verify()
        except ReshardError as error:
            note = str(error)
        self._report(f"{label}, weights equal", not note, goal=IS_TRUE, note=note)

    def _check_sharing(self, actor: Any, manager: Any) -> None:
        """Compare device memory while the engine is awake, with its own weights and with the trainer's."""
        shapes, itemsize = self._engine.weight_shapes(), actor.weights.dtype.itemsize
        common = sum(prod(shapes[name]) * itemsize for name in manager.shared_parameters)
        whole = sum(prod(shape) * itemsize for shape in shapes.values())
        self._report("share of weights shared", common / whole, goal=Goal(">", 0.0))
        if not self._context.on_gpu:
            reason = "CPU memory is not split between trainer and engine"
            self._context.report(Skipped(self._name("memory freed by sharing"), reason))
            return
        free = []
        for each in (rig.make_manager(actor, self._engine), manager):
            each.sync()
            free.append(timing.free_bytes())
            each.sleep()
        freed = free[1] - free[0]
        self._report("memory freed by sharing", freed / timing.GIB, "GiB")
        goal = None if self._context.tiny else Goal(">=", _FREED)  # tiny weights are smaller than a page of the driver
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
        self._context.report(Figure(self._name(name), value, unit, goal, note))

    def _name(self, name: str) -> str:
        return f"{self._case.name}: {name}"


def _bits(actor: Any) -> list[int]:
    """Sum over the bits of each weight and each tensor of the optimizer state."""
    import torch

    from rlhpc.backends.megatron.optimizer import inner_optimizers

    states: list[Mapping[str, Any]] = [own for o in inner_optimizers(actor.optimizer) for own in o.state.values()]
    tensors = [*actor.weights.parameters(), *(value for own in states for value in own.values())]
    words = {2: torch.int16, 4: torch.int32}
    return [int(t.detach().reshape(-1).view(words[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]
