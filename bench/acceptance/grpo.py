"""Complete GRPO steps through the path of ``rlhpc run``, compared with the predictions of ``rlhpc plan``.

Weights are random and never emit the end token, so that every response has the maximum length. Torch-free: the device
belongs to the rank, whose program records the device memory in use in each phase.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from bench.acceptance import runs
from bench.acceptance.machine import opened, read_fingerprint, used_memory
from bench.acceptance.results import Context, Figure, Goal, Skipped
from bench.shapes import model_shape
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.context import RankContext
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record
from rlhpc.launch.machine import gpu_count
from rlhpc.models import ModelShape
from rlhpc.plan.calibrate import Measured, calibrate, read_run
from rlhpc.plan.estimates.hardware import Gpu, gpu_of_device
from rlhpc.plan.estimates.memory import GIB, predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import num_parameters

MEMORY_ERROR, TIME_ERROR, CALIBRATED_ERROR = 0.10, 0.30, 0.10  # goals, relative
_SPARE = 0.08  # share of device memory left free when the number of layers is selected
_FILE_SHARE = 0.5  # maximum share of the free disk for a model
# Phases by their names in metrics, with their names in memory peaks.
_PHASES = {"weight_sync": "weight sync", "rollout": "rollout", "log_probs": "log-probs", "update": "update"}
# For a CPU, and for a GPU without an entry: predictions are reported without goals.
_UNKNOWN = Gpu("unknown", 0.1, 16.0, 20.0, 10.0, 10.0, 10.0, 20.0)

_PERIOD_SECONDS = 0.05  # a sample takes half a millisecond
OTHER = "start"  # joining, loading, building the engine
# Phases of a step, by phase of a rank's heartbeat.
_OF_HEARTBEAT = {
    **dict.fromkeys(("weight sync",), "weight sync"),
    **dict.fromkeys(("rollout", "generate", "score"), "rollout"),
    **dict.fromkeys(("log_probs", "forward"), "log-probs"),
    **dict.fromkeys(("update", "backward and forward"), "update"),
}


@dataclass(frozen=True)
class Work:
    """A model and the size of its steps."""

    shape: str
    prompts: int
    samples: int  # per prompt
    prompt_tokens: int  # longest; the shortest is a quarter of it
    response_tokens: int
    tokens_per_microbatch: int
    engine_share: float  # share of device memory
    steps: int = 5


LARGE = {"1.5b": Work("1.5b", 32, 8, 256, 768, 8192, 0.35), "8b": Work("8b", 16, 8, 256, 512, 8192, 0.3)}
TINY = Work("tiny", 4, 4, 32, 16, 512, 0.3, steps=4)


@dataclass(frozen=True)
class Case:
    """A run and what its predictions need. ``known``: whether the GPU has an entry in the planner's table."""

    config: RunConfig
    shape: ModelShape
    gpu: Gpu
    known: bool

    def goal(self, limit: float) -> Goal | None:
        """Goal of a prediction's error; none for an unknown GPU."""
        return Goal("<=", limit) if self.known else None


def run_1_5b(context: Context) -> None:
    """Measure Qwen2.5-1.5B with all layers."""
    _measure(context, TINY if context.tiny else LARGE["1.5b"])


def run_8b(context: Context) -> None:
    """Measure Llama-3.1-8B with as many layers as fit by the plan."""
    _measure(context, TINY if context.tiny else LARGE["8b"])


def _measure(context: Context, work: Work) -> None:
    gpu, known = _gpu(context)
    layers = fitting_layers(context.folder, work, gpu)
    if layers is None:
        context.report(Skipped(work.shape, f"by the plan, not even one layer fits into {gpu.memory_gib:g} GiB"))
        return
    shape, config = model_shape(work.shape, layers), run_config(context.folder, work, on_gpu=context.on_gpu)
    context.report(Figure("layers", layers, note=f"{num_parameters(shape) / 1e9:.2f} billion parameters"))
    _write_model(context.folder, work.shape, layers, context.dtype)
    _write_prompts(Path(config.data.train[0].path), work)
    before = used_memory() if context.on_gpu else None
    case, records = Case(config, shape, gpu, known), runs.run(config, entry=f"{__name__}:run_rank")
    for result in chain(step_figures(case, records), memory_figures(case, before), time_figures(case, records)):
        context.report(result)


def _gpu(context: Context) -> tuple[Gpu, bool]:
    """The machine's entry in the table of GPUs with its actual memory, and whether there is an entry."""
    if not context.on_gpu:
        return _UNKNOWN, False
    found = read_fingerprint(gpu_count())
    gpu = gpu_of_device(found.gpu or "")
    if gpu is None:
        context.report(Skipped("goals of the plan", f"{found.gpu} is not in the planner's table (site.gpus)"))
    known = gpu is not None and not context.tiny
    return replace(gpu or _UNKNOWN, memory_gib=found.gpu_memory_gib or _UNKNOWN.memory_gib), known


def fitting_layers(folder: Path, work: Work, gpu: Gpu) -> int | None:
    """Maximum number of layers that fit, by the plan, into the device and, as files, on the disk."""
    config, disk = run_config(folder, work, on_gpu=True), shutil.disk_usage(folder).free
    for layers in range(model_shape(work.shape).num_layers, 0, -1):
        shape = model_shape(work.shape, layers)
        peak = predict_memory(config, shape, ParallelLayout(1), gpu.memory_gib).peak
        if peak <= (1 - _SPARE) * gpu.memory_bytes and 2 * num_parameters(shape) <= _FILE_SHARE * disk:
            return layers
    return None


def run_config(folder: Path, work: Work, *, on_gpu: bool) -> RunConfig:
    """Config of one rank: two updates per step, so that there is a log-prob pass; no reference model, which would take
    the place of layers."""
    mean, responses = round(0.625 * work.prompt_tokens), work.prompts * work.samples
    engine = {"gpu_memory_utilization": work.engine_share} if on_gpu else {"kv_cache_gib": 0.0625}
    sampling = {"samples_per_prompt": work.samples, "max_response_tokens": work.response_tokens}
    steps = {"steps": work.steps, "prompts_per_step": work.prompts, "minibatches": 2}
    fields: dict[str, Any] = {
        "name": f"grpo-{work.shape}",
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if on_gpu else "float32"},
        "data": {"train": [str(folder / "prompts.jsonl")], "max_prompt_tokens": work.prompt_tokens + 4},
        "rewards": [{"function": "bench.workload:varied"}],
        "rollout": {**sampling, **engine, "max_num_seqs": responses},
        "algorithm": {"kl": {"coefficient": 0.0}},
        "train": {**steps, "tokens_per_microbatch": work.tokens_per_microbatch},
        "checkpoint": {"every": 0},
        "planning": {"prompt_tokens": mean, "response_tokens": work.response_tokens, "response_spread": 0.0},
    }
    return runs.configure(fields)


def _write_model(folder: Path, shape: str, layers: int, dtype: str) -> None:
    """Write the model in a separate process, which leaves no memory in use on the device."""
    call = f"write_model(Path({str(folder / 'model')!r}), {shape!r}, {layers}, dtype={dtype!r})"
    code = f"from pathlib import Path; from bench.shapes import write_model; {call}"
    subprocess.run([sys.executable, "-c", code], check=True)


def _write_prompts(file: Path, work: Work) -> None:
    """Write prompts of ragged lengths; the tokenizer has one token per character."""
    rng = random.Random(0)
    with open(file, "w", encoding="utf-8") as out:
        for _ in range(work.prompts * work.steps):
            length = rng.randint(work.prompt_tokens // 4, work.prompt_tokens - 4)
            prompt = [{"role": "user", "content": "".join(rng.choices(string.ascii_lowercase, k=length))}]
            reward = {"style": "rule", "ground_truth": ""}
            row = {"data_source": "acceptance", "prompt": prompt, "reward_model": reward, "extra_info": {}}
            print(json.dumps(row), file=out)


def step_figures(case: Case, records: list[Record]) -> Iterator[Figure]:
    """Medians over all steps but the first, which compiles kernels and verifies weights."""
    steps = [record for record in records if record["phase"] == "rl" and record["step"] > 1]

    def middle(key: str) -> float:
        return float(median(record[key] for record in steps))

    decoded = median(record["rollout/completion_tokens"] / record["perf/rollout_seconds"] for record in steps)
    yield Figure("step", middle("perf/step_seconds"), "s", note=f"median of {len(steps)} steps")
    for key, phase in _PHASES.items():
        yield Figure(f"step: {phase}", middle(f"perf/{key}_seconds"), "s")
    yield Figure("tokens", middle("perf/tokens_per_second"), "1/s", note="prompts and responses, entire step")
    yield Figure("decoded", decoded, "1/s", note="response tokens per second of rollout")
    if case.known:
        step = predict_step(case.config, case.shape, ParallelLayout(1), case.gpu, EfficiencySection())
        mfu = step.training_flops / middle("perf/update_seconds") / (case.gpu.tflops * 1e12)
        yield Figure("MFU of updates", mfu, note=f"of {case.gpu.tflops:g} TFLOP/s")
    yield Figure("logprob_diff_mean", middle("logprob_diff_mean"))


def memory_figures(case: Case, before: int | None) -> Iterator[Figure | Skipped]:
    """Device memory, without the ``before`` bytes of other processes, compared with the plan."""
    peaks = read_peaks(RunFolder(case.config.folder))
    if peaks is None or before is None:
        yield Skipped("peak memory", "needs a GPU")
        return
    plan = predict_memory(case.config, case.shape, ParallelLayout(1), case.gpu.memory_gib)
    for phase, used in sorted(peaks.used.items()):
        note = f"{peaks.allocated.get(phase, 0) / GIB:.1f} GiB by PyTorch's allocator"
        yield Figure(f"memory: {phase}", (used - before) / GIB, "GiB", note=note)
    for planned in plan.phases:
        yield Figure(f"memory, plan: {planned.name}", planned.total / GIB, "GiB")
    peak = max(peaks.used.values()) - before
    fullest = max(plan.phases, key=lambda phase: phase.total).name
    note = f"{plan.peak / GIB:.1f} GiB predicted ({fullest}), {peak / GIB:.1f} GiB measured"
    yield Figure("memory: error of the plan's peak", abs(plan.peak / peak - 1), "", case.goal(MEMORY_ERROR), note)
    if "update" in peaks.used:
        parts = next(phase.parts for phase in plan.phases if phase.name == "forward and backward")
        reserved = parts["libraries"] + parts["engine, asleep"]
        more = peaks.used["update"] - before - (sum(parts.values()) - reserved)
        note = f"in updates; the plan allows {reserved / GIB:.1f}"
        yield Figure("memory: libraries and sleeping engine", more / GIB, "GiB", note=note)


def time_figures(case: Case, records: list[Record]) -> Iterator[Figure]:
    """The last step compared with its prediction, by the planner's defaults and calibrated on the steps before it."""
    folder = case.config.folder
    fitted, held = _measured(folder / "fitted", records[:-1]), _measured(folder / "held", records[-1:])
    found = calibrate(case.config, case.shape, ParallelLayout(1), case.gpu, EfficiencySection(), fitted)
    each = [
        f"{name} {found.before[name]:.3g} s predicted, {seconds:.3g} s measured"
        for name, seconds in held.seconds.items()
    ]
    note = "all phases of the last step, which is held out from the calibration"
    before, after = (_error(predicted, held) for predicted in (found.before, found.after))
    yield Figure("time: error of the plan", before, "", case.goal(TIME_ERROR), "; ".join(each))
    yield Figure("time: error after calibration", after, "", case.goal(CALIBRATED_ERROR), note)
    text = ", ".join(f"{name}: {value:g}" for name, value in found.phases.items())
    yield Figure("time: calibration", text, note="site.efficiency.phases of this machine")


def _measured(folder: Path, records: list[Record]) -> Measured:
    """Phases of a run with these records, as the calibration of ``rlhpc plan`` reads it."""
    folder.mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    RunFolder(folder).metrics.write_text(text, encoding="utf-8")
    return read_run(folder)


def _error(predicted: Mapping[str, float], measured: Measured) -> float:
    """Relative error of the sum over the measured phases."""
    total = sum(measured.seconds.values())
    return abs(sum(predicted[name] for name in measured.seconds) - total) / total


# ---- the rank's program


@dataclass
class Peaks:
    """Maximum bytes by phase."""

    used: dict[str, int]  # of the whole device, other processes included, as its driver reports
    allocated: dict[str, int]  # by PyTorch


def run_rank(context: RankContext) -> str | None:
    """Run the trainer without a final checkpoint. On a GPU the first rank writes its peaks to the run folder."""
    from rlhpc.trainer import main

    sampler = Sampler(context)
    if context.info.rank == 0:
        sampler.start()
    stopped = main.run_rank(context, saves_end=False)
    sampler.end(peaks_file(context.run))
    return stopped


def peaks_file(folder: RunFolder) -> Path:
    return folder.path / "peaks.json"


def read_peaks(folder: RunFolder) -> Peaks | None:
    """Peaks of a run; None on a CPU."""
    file = peaks_file(folder)
    return Peaks(**read_json(file)) if file.exists() else None


class Sampler(threading.Thread):
    """Samples the device's memory in use."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(name="memory", daemon=True)
        self._context, self._over, self._peaks = context, threading.Event(), Peaks({}, {})

    def run(self) -> None:
        import torch

        with opened() as (library, handle):
            while library is not None and not self._over.wait(_PERIOD_SECONDS):
                if torch.cuda.is_initialized():  # by the rank, on its own device
                    used = int(library.nvmlDeviceGetMemoryInfo(handle).used)
                    self._note(used, torch.cuda.memory_allocated(self._context.info.local_rank))

    def end(self, file: Path) -> None:
        self._over.set()
        if self.is_alive():
            self.join()
        if self._peaks.used:
            write_json(file, asdict(self._peaks))

    def _note(self, used: int, allocated: int) -> None:
        phase = _OF_HEARTBEAT.get(self._context.heartbeat.phase, OTHER)
        for peaks, value in ((self._peaks.used, used), (self._peaks.allocated, allocated)):
            peaks[phase] = max(peaks.get(phase, 0), value)
