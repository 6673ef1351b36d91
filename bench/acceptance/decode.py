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

from bench import rig
from bench.acceptance.process import BOTH, WorkerCall, WorkerFailed, Workers, report_failure, started_ahead
from bench.acceptance.results import Context, Figure, Goal, Skipped
from bench.device_time import GIB, seconds
from rlhpc.core import env

_GOAL = Goal(">=", 0.95)
_DUMMY = 1e-3  # vLLM's dummy weights are uniform in [-1e-3, 1e-3]
Generate = Callable[[], int]  # generates a batch and returns its number of tokens


@dataclass(frozen=True)
class Comparison:
    """Both systems on one model shape, with one batch of requests of equal lengths."""

    shape: str
    count: int
    prompt: int
    response: int
    cache_gib: float
    rounds: int
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.shape}, {'CUDA graphs' if self.graphs else 'eager'}"

    @property
    def calls(self) -> list[WorkerCall]:
        """Calls that start each system."""
        arguments = {"comparison": asdict(self)}
        return [
            WorkerCall(f"{self.name}, {system}", f"{__name__}:{function}", arguments, imports=BOTH)
            for system, function in (("rlhpc", "serve"), ("vllm", "serve_stock"))
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
        ready = [pair for pair in pairs if _answers(context, *pair, Workers.answer)]
        for comparison, pair in ready:  # all engines have compiled
            _compare(context, comparison, pair)
        for one in workers:
            one.close()  # frees memory for the next group's engines


def comparisons(context: Context) -> list[list[Comparison]]:
    """Comparisons in groups whose engines fit together into a GPU of 80 GB, most informative first."""
    modes = (True, False) if context.on_gpu else (False,)
    if context.tiny:
        return [[Comparison("tiny", 4, 12, 12, 0.0625, 2, graphs) for graphs in modes]]
    shapes = (("8b", 2.5), ("1.5b", 0.75))  # about 60 GiB with both systems
    groups = [[Comparison(shape, 64, 128, 128, gib, 3, graphs) for shape, gib in shapes] for graphs in modes]
    return groups if context.on_gpu else [[one] for group in groups for one in reversed(group)]


def _answers(
    context: Context, comparison: Comparison, pair: Sequence[Workers], ask: Callable[[Workers], dict[str, float]]
) -> list[dict[str, float]]:
    """An answer of each system; none if one fails, which is reported."""
    found = []
    for call, workers in zip(comparison.calls, pair, strict=True):
        try:
            found.append(ask(workers))
        except WorkerFailed as error:
            report_failure(context, call, workers, error)
            return []
    return found


def _compare(context: Context, work: Comparison, pair: Sequence[Workers]) -> None:
    rounds = [_answers(context, work, pair, Workers.ask) for _ in range(work.rounds)]
    if not all(rounds):
        return
    rates = [
        {way: work.count * work.response / statistics.median(each[i][way] for each in rounds) for way in rounds[0][i]}
        for i in range(2)
    ]
    ours, stock, seeded = rates[0]["seconds"], rates[1]["seconds"], rates[1]["seeded"]
    note = f"{work.count} prompts of {work.prompt} tokens, responses of {work.response}"
    for figure in (
        Figure("rlhpc", ours, "tokens/s", note=note),
        Figure("vLLM", stock, "tokens/s", note="without seeds, as commonly used"),
        Figure("vLLM with seeds", seeded, "tokens/s", note="a seed per request, as in rlhpc"),
        Figure("rlhpc / vLLM", ours / stock, goal=None if context.tiny else _GOAL),
        Figure("rlhpc / vLLM with seeds", ours / seeded),
    ):
        context.report(figure.of(work.name))


def _serve(ways: dict[str, Generate], work: Comparison, stop: Callable[[], Any]) -> Generator[dict[str, float]]:
    """Seconds of a batch in each way. The first item comes when each way has generated one."""

    def timed(generate: Generate) -> float:
        found: list[int] = []
        taken = seconds(lambda: found.append(generate()))
        assert found == [work.count * work.response], f"{found} tokens: responses ended early"
        return taken

    try:
        while True:
            yield {name: timed(generate) for name, generate in ways.items()}
    finally:
        stop()


def _model(context: Context, work: Comparison, system: str) -> tuple[Path, Any, list[Any]]:
    folder = context.folder / "models" / f"{work.shape}-{system}"
    folder, shape = rig.model_folder(folder, work.shape, None, context.dtype)
    return folder, shape, rig.requests(shape, work.count, work.prompt, work.response)


def serve(context: Context, comparison: dict[str, Any]) -> Generator[dict[str, float]]:
    """Start rlhpc's engine in this process; each item is the seconds of a batch."""
    began, work = time.perf_counter(), Comparison(**comparison)
    folder, shape, asked = _model(context, work, "rlhpc")
    section = {"kv_cache_gib": work.cache_gib, "max_num_seqs": work.count, "cuda_graphs": work.graphs}
    engine = rig.make_engine(folder, shape, context.dtype, work.prompt + work.response, **section)
    engine.wake_weights()
    for tensor in engine.open_weights().values():
        tensor.uniform_(-_DUMMY, _DUMMY)
    engine.close_weights()
    engine.wake_cache()
    context.log(f"ready after {time.perf_counter() - began:.0f} s")
    ways = {"seconds": lambda: sum(len(completion.tokens) for completion in engine.generate(asked))}
    yield from _serve(ways, work, engine.shutdown)


def serve_stock(context: Context, comparison: dict[str, Any]) -> Generator[dict[str, float]]:
    """The same with vLLM's defaults, except for sizes common to both systems and for what it would read from disk.

    Without a limit to the most probable tokens it samples without FlashInfer, but would import it.
    """
    os.environ.setdefault(env.VLLM_USE_FLASHINFER_SAMPLER, "0")
    from vllm import LLM, SamplingParams

    began, work = time.perf_counter(), Comparison(**comparison)
    folder, _, asked = _model(context, work, "vllm")
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": context.dtype,
        "max_model_len": work.prompt + work.response,
        "max_num_seqs": work.count,
        "kv_cache_memory_bytes": int(work.cache_gib * GIB),
        "gpu_memory_utilization": rig.ENGINE_FRACTION,
        "enforce_eager": not work.graphs,
        "skip_tokenizer_init": True,
    }
    llm = LLM(str(folder), **arguments)
    prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in asked]
    same: dict[str, Any] = {"max_tokens": work.response, "logprobs": 0, "ignore_eos": True, "detokenize": False}

    def with_(seeds: Sequence[int | None]) -> Generate:
        parameters = [SamplingParams(temperature=1.0, seed=seed, **same) for seed in seeds]
        return lambda: sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, parameters, use_tqdm=False))

    context.log(f"ready after {time.perf_counter() - began:.0f} s")
    ways = {"seconds": with_([None] * len(asked)), "seeded": with_([request.seed for request in asked])}
    yield from _serve(ways, work, llm.llm_engine.engine_core.shutdown)  # its core is a separate process
