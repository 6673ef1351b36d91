"""Complete GRPO steps through the path of ``rlhpc run``, compared with the predictions of ``rlhpc plan``.

Weights are random and never emit the end token, so that every response has the maximum length. Torch-free: the device
belongs to the rank.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.acceptance.device import used_memory
from bench.acceptance.fingerprint import read_fingerprint
from bench.acceptance.part import Context, Figure, Goal, Skipped
from bench.acceptance.parts import runs
from bench.acceptance.parts.models import model_shape
from bench.acceptance.parts.probe import read_peaks
from rlhpc.config.schema import RunConfig
from rlhpc.config.site import EfficiencySection
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import Record
from rlhpc.launch.machine import gpu_count
from rlhpc.models import ModelShape
from rlhpc.plan.calibrate import Calibration, Measured, calibrate, read_run
from rlhpc.plan.estimates.hardware import Gpu, gpu_of_device
from rlhpc.plan.estimates.memory import GIB, MemoryPlan, predict_memory
from rlhpc.plan.estimates.step_time import predict_step
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import num_parameters

MEMORY_ERROR, TIME_ERROR, CALIBRATED_ERROR = 0.10, 0.30, 0.10  # goals, relative
_SPARE = 0.08  # share of device memory left free when the number of layers is selected
_FILE_SHARE = 0.5  # maximum share of the free disk for a model
_ENTRY = "bench.acceptance.parts.probe:run_rank"
# Phases by their names in metrics, with their names in memory peaks.
_PHASES = {"weight_sync": "weight sync", "rollout": "rollout", "log_probs": "log-probs", "update": "update"}
# For a CPU, and for a GPU without an entry: predictions are reported without goals.
_UNKNOWN = Gpu("unknown", 0.1, 16.0, 20.0, 10.0, 10.0, 10.0, 20.0)


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


LARGE = {
    "1.5b": Work("1.5b", 32, 8, 256, 768, 8192, 0.35),
    "8b": Work("8b", 16, 8, 256, 512, 8192, 0.3),
}
TINY = Work("tiny", 4, 4, 32, 16, 512, 0.3, steps=4)


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
    parameters = num_parameters(shape)
    context.report(Figure("layers", float(layers), note=f"{parameters / 1e9:.2f} billion parameters"))
    _write_model(context.folder, work.shape, layers, config.model.dtype)
    _write_prompts(Path(config.data.train[0].path), work)
    before = used_memory() if context.on_gpu else None
    records = runs.run(config, entry=_ENTRY)
    for figure in step_figures(config, shape, gpu, records, known=known):
        context.report(figure)
    for result in memory_figures(config, shape, gpu, before, known=known):
        context.report(result)
    for figure in time_figures(config, shape, gpu, records, known=known):
        context.report(figure)


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
    mean_prompt = round(0.625 * work.prompt_tokens)
    rollout: dict[str, Any] = {
        "samples_per_prompt": work.samples,
        "max_response_tokens": work.response_tokens,
        "max_num_seqs": work.prompts * work.samples,
    }
    rollout |= {"gpu_memory_utilization": work.engine_share} if on_gpu else {"kv_cache_gib": 0.0625}
    fields: dict[str, Any] = {
        "name": f"grpo-{work.shape}",
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if on_gpu else "float32"},
        "data": {"train": [str(folder / "prompts.jsonl")], "max_prompt_tokens": work.prompt_tokens + 4},
        "rewards": [{"function": "bench.acceptance.parts.rewards:varied"}],
        "rollout": rollout,
        "algorithm": {"kl": {"coefficient": 0.0}},
        "train": {
            "steps": work.steps,
            "prompts_per_step": work.prompts,
            "minibatches": 2,
            "tokens_per_microbatch": work.tokens_per_microbatch,
        },
        "checkpoint": {"every": 0},
        "observe": {"tensorboard": False},
        "planning": {
            "prompt_tokens": mean_prompt,
            "response_tokens": work.response_tokens,
            "response_spread": 0.0,
        },
    }
    return runs.configure(fields)


def _write_model(folder: Path, shape: str, layers: int, dtype: str) -> None:
    """Write the model in a separate process, which leaves no memory in use on the device."""
    code = f"""
from pathlib import Path
from bench.acceptance.parts.models import write_model
write_model(Path({str(folder / "model")!r}), {shape!r}, {layers}, dtype={dtype!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _write_prompts(file: Path, work: Work) -> None:
    """Write prompts of ragged lengths; the tokenizer has one token per character."""
    rng = random.Random(0)
    rows = []
    for _ in range(work.prompts * work.steps):
        length = rng.randint(work.prompt_tokens // 4, work.prompt_tokens - 4)
        text = "".join(rng.choices(string.ascii_lowercase, k=length))
        rows.append(
            {
                "data_source": "acceptance",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {},
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def step_figures(
    config: RunConfig, shape: ModelShape, gpu: Gpu, records: list[Record], *, known: bool
) -> Iterator[Figure]:
    """Medians over all steps but the first, which compiles kernels and verifies weights."""
    steps = [record for record in records if record["phase"] == "rl" and record["step"] > 1]

    def middle(key: str) -> float:
        return float(median(record[key] for record in steps))

    yield Figure("step", middle("perf/step_seconds"), "s", note=f"median of {len(steps)} steps")
    for phase in _PHASES:
        yield Figure(f"step: {_PHASES[phase]}", middle(f"perf/{phase}_seconds"), "s")
    yield Figure("tokens", middle("perf/tokens_per_second"), "1/s", note="prompts and responses, entire step")
    yield Figure("decoded", _decoded(steps), "1/s", note="response tokens per second of rollout")
    if known:
        flops = predict_step(config, shape, ParallelLayout(1), gpu, EfficiencySection()).training_flops
        mfu = flops / middle("perf/update_seconds") / (gpu.tflops * 1e12)
        yield Figure("MFU of updates", mfu, note=f"of {gpu.tflops:g} TFLOP/s")
    yield Figure("logprob_diff_mean", middle("logprob_diff_mean"))


def _decoded(steps: list[Record]) -> float:
    return float(median(record["rollout/completion_tokens"] / record["perf/rollout_seconds"] for record in steps))


def memory_figures(
    config: RunConfig, shape: ModelShape, gpu: Gpu, before: int | None, *, known: bool
) -> Iterator[Figure | Skipped]:
    """Device memory, without that of other processes, compared with the plan."""
    peaks = read_peaks(RunFolder(config.folder))
    if peaks is None or before is None:
        yield Skipped("peak memory", "needs a GPU")
        return
    plan = predict_memory(config, shape, ParallelLayout(1), gpu.memory_gib)
    for phase, used in sorted(peaks.used.items()):
        allocated = peaks.allocated.get(phase, 0) / GIB
        yield Figure(
            f"memory: {phase}", (used - before) / GIB, "GiB", note=f"{allocated:.1f} GiB by PyTorch's allocator"
        )
    peak = max(peaks.used.values()) - before
    for planned in plan.phases:
        yield Figure(f"memory, plan: {planned.name}", planned.total / GIB, "GiB")
    goal = Goal("<=", MEMORY_ERROR) if known else None
    yield Figure("memory: error of the plan's peak", abs(plan.peak / peak - 1), "", goal, _peak_note(plan, peak))
    if "update" in peaks.used:
        parts = next(phase.parts for phase in plan.phases if phase.name == "forward and backward")
        reserved = parts["libraries"] + parts["engine, asleep"]
        more = peaks.used["update"] - before - (sum(parts.values()) - reserved)
        note = f"in updates; the plan allows {reserved / GIB:.1f}"
        yield Figure("memory: libraries and sleeping engine", more / GIB, "GiB", note=note)


def _peak_note(plan: MemoryPlan, peak: int) -> str:
    fullest = max(plan.phases, key=lambda phase: phase.total).name
    return f"{plan.peak / GIB:.1f} GiB predicted ({fullest}), {peak / GIB:.1f} GiB measured"


def time_figures(
    config: RunConfig, shape: ModelShape, gpu: Gpu, records: list[Record], *, known: bool
) -> Iterator[Figure]:
    """The last step compared with its prediction, by the planner's defaults and calibrated on the steps before it."""
    folder = config.folder
    fitted, held = _measured(folder / "fitted", records[:-1]), _measured(folder / "held", records[-1:])
    found = calibrate(config, shape, ParallelLayout(1), gpu, EfficiencySection(), fitted)
    goals = (Goal("<=", TIME_ERROR), Goal("<=", CALIBRATED_ERROR)) if known else (None, None)
    note = "all phases of the last step, which is held out from the calibration"
    yield Figure("time: error of the plan", _error(found.before, held), "", goals[0], _phases_note(found.before, held))
    yield Figure("time: error after calibration", _error(found.after, held), "", goals[1], note)
    yield Figure("time: calibration", _fitted_text(found), note="site.efficiency of this machine")


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


def _phases_note(predicted: Mapping[str, float], measured: Measured) -> str:
    """Predicted and measured seconds of each phase."""
    return "; ".join(
        f"{name} {predicted[name]:.3g} s predicted, {seconds:.3g} s measured"
        for name, seconds in measured.seconds.items()
    )


def _fitted_text(found: Calibration) -> str:
    return ", ".join(f"{name}: {value:g}" for name, value in found.changed.items()) or "nothing changed"
