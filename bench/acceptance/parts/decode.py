"""Decoding: tokens per second of rlhpc's engine and of vLLM's ``LLM.generate``, with and without CUDA graphs.

Both have the same shape, dummy weights, prompts, response lengths and sampling, each in its own process. They
alternate; the median round counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.acceptance.part import Context, Figure, Goal, Skipped
from bench.acceptance.parts import rig, timing
from bench.acceptance.workers import BOTH, WorkerCall, WorkerFailed, Workers, report_failure, started_ahead
from rlhpc.core import env

SYSTEMS = ("rlhpc", "vllm")
_GOAL = Goal(">=", 0.95)
_DUMMY = 1e-3  # vLLM's dummy weights are uniform in [-1e-3, 1e-3]


@dataclass(frozen=True)
class DecodeWorkload:
    """A model shape and one batch of requests of equal lengths."""

    shape: str
    count: int
    prompt: int
    response: int
    cache_gib: float
    rounds: int = 3


_FULL = (DecodeWorkload("1.5b", 64, 128, 128, 0.75), DecodeWorkload("8b", 64, 128, 128, 2.5))
_TINY = (DecodeWorkload("tiny", 4, 12, 12, 0.0625, rounds=2),)


@dataclass(frozen=True)
class Comparison:
    """Both systems on one workload in one mode."""

    workload: DecodeWorkload
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.workload.shape}, {'CUDA graphs' if self.graphs else 'eager'}"

    @property
    def calls(self) -> list[WorkerCall]:
        """Calls that start each system."""
        arguments = {"workload": asdict(self.workload), "graphs": self.graphs}
        return [
            WorkerCall(f"{self.name}, {system}", f"{__name__}:serve", {**arguments, "system": system}, imports=BOTH)
            for system in SYSTEMS
        ]


def run(context: Context) -> None:
    """Run every comparison. Engines that fit into the GPU together start together, since compilation takes longest."""
    if not context.on_gpu:
        context.report(Skipped("CUDA graphs", "needs a GPU"))
    groups = comparisons(context)
    started = started_ahead(context, [[call for each in group for call in each.calls] for group in groups])
    for group, workers in zip(groups, started, strict=True):
        for one in workers:
            one.go()
        pairs = [(comparison, workers[2 * i : 2 * i + 2]) for i, comparison in enumerate(group)]
        ready = [(comparison, pair) for comparison, pair in pairs if _ready(context, comparison, pair)]
        for comparison, pair in ready:  # all engines have compiled
            _compare(context, comparison, pair)
        for one in workers:
            one.close()  # frees memory for the next group's engines


def comparisons(context: Context) -> list[list[Comparison]]:
    """Comparisons in groups whose engines fit together into a GPU of 80 GB, most informative first."""
    if not context.on_gpu:
        return [[Comparison(workload, graphs=False)] for workload in (_TINY if context.tiny else _FULL)]
    if context.tiny:
        return [[Comparison(workload, graphs) for workload in _TINY for graphs in (True, False)]]
    small, large = _FULL  # about 60 GiB with both systems
    return [[Comparison(workload, graphs) for workload in (large, small)] for graphs in (True, False)]


def _ready(context: Context, comparison: Comparison, pair: Sequence[Workers]) -> bool:
    """Wait for the first answer of both engines; False if one fails."""
    for call, workers in zip(comparison.calls, pair, strict=True):
        try:
            context.log(f"{call.name}: ready after {workers.answer()['start']:.0f} s")
        except WorkerFailed as error:
            report_failure(context, call, workers, error)
            return False
    return True


def _compare(context: Context, comparison: Comparison, pair: Sequence[Workers]) -> None:
    rounds: list[list[dict[str, float]]] = [[], []]
    for _ in range(comparison.workload.rounds):
        for number, (call, workers) in enumerate(zip(comparison.calls, pair, strict=True)):
            try:
                rounds[number].append(workers.ask())
            except WorkerFailed as error:
                report_failure(context, call, workers, error)
                return
    _report(context, comparison.name, comparison.workload, rounds)


def _report(context: Context, mode: str, workload: DecodeWorkload, rates: Sequence[Sequence[dict[str, float]]]) -> None:
    tokens = workload.count * workload.response
    ours, stock = (tokens / statistics.median(round_["seconds"] for round_ in each) for each in rates)
    seeded = tokens / statistics.median(round_["seeded"] for round_ in rates[1])
    note = f"{workload.count} prompts of {workload.prompt} tokens, responses of {workload.response}"
    context.report(Figure(f"{mode}: rlhpc", ours, "tokens/s", note=note))
    context.report(Figure(f"{mode}: vLLM", stock, "tokens/s", note="without seeds, as commonly used"))
    context.report(Figure(f"{mode}: vLLM with seeds", seeded, "tokens/s", note="a seed per request, as in rlhpc"))
    context.report(Figure(f"{mode}: rlhpc / vLLM", ours / stock, goal=None if context.tiny else _GOAL))
    context.report(Figure(f"{mode}: rlhpc / vLLM with seeds", ours / seeded))


def serve(
    context: Context, system: str, workload: dict[str, Any], *, graphs: bool
) -> Generator[dict[str, float], None, None]:
    """Start an engine in this process; each further item is the seconds of a batch."""
    began = time.perf_counter()
    work, dtype = DecodeWorkload(**workload), rig.dtype_of(context)
    folder, shape = rig.model_folder(context.folder / "models" / f"{work.shape}-{system}", work.shape, None, dtype)
    start = _start_ours if system == "rlhpc" else _start_stock
    ways, stop = start(folder, shape, work, dtype, graphs=graphs)
    try:
        for generate in ways.values():
            _generated(generate, work)
        yield {"start": time.perf_counter() - began}
        while True:
            yield {name: _generated(generate, work) for name, generate in ways.items()}
    finally:
        stop()


def _generated(generate: Callable[[], int], work: DecodeWorkload) -> float:
    """Seconds to generate one batch."""
    found = 0

    def action() -> None:
        nonlocal found
        found = generate()

    taken = timing.seconds(action)
    assert found == work.count * work.response, f"{found} tokens: responses ended early"
    return taken


Started = tuple[dict[str, Callable[[], int]], Callable[[], Any]]  # ways to generate a batch, and the engine's shutdown


def _start_ours(folder: Path, shape: Any, work: DecodeWorkload, dtype: str, *, graphs: bool) -> Started:
    longest = work.prompt + work.response
    engine = rig.make_engine(rig.EngineSpec(folder, shape, dtype, longest, work.cache_gib, work.count, graphs=graphs))
    engine.wake_weights()
    for tensor in engine.open_weights().values():
        tensor.uniform_(-_DUMMY, _DUMMY)
    engine.close_weights()
    engine.wake_cache()
    asked = rig.requests(shape, work.count, work.prompt, work.response)
    return {"seconds": lambda: sum(len(completion.tokens) for completion in engine.generate(asked))}, engine.shutdown


def _start_stock(folder: Path, shape: Any, work: DecodeWorkload, dtype: str, *, graphs: bool) -> Started:
    """Start vLLM with its defaults, except for sizes common to both systems and for what it would read from disk.

    Without a limit to the most probable tokens it samples without FlashInfer, but would import it.
    """
    os.environ.setdefault(env.VLLM_USE_FLASHINFER_SAMPLER, "0")
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": dtype,
        "max_model_len": work.prompt + work.response,
        "max_num_seqs": work.count,
        "kv_cache_memory_bytes": int(work.cache_gib * timing.GIB),
        "gpu_memory_utilization": rig.ENGINE_FRACTION,
        "enforce_eager": not graphs,
        "skip_tokenizer_init": True,
    }
    llm = LLM(str(folder), **arguments)
    asked = rig.requests(shape, work.count, work.prompt, work.response)
    prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in asked]
    same: dict[str, Any] = {"max_tokens": work.response, "logprobs": 0, "ignore_eos": True, "detokenize": False}

    def with_(parameters: Sequence[Any]) -> Callable[[], int]:
        def generate() -> int:
            outputs = llm.generate(prompts, list(parameters), use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return generate

    ways = {
        "seconds": with_([SamplingParams(temperature=1.0, **same) for _ in asked]),
        "seeded": with_([SamplingParams(temperature=1.0, seed=request.seed, **same) for request in asked]),
    }
    return ways, llm.llm_engine.engine_core.shutdown  # its core is a separate process
