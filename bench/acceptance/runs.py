"""Runs inside a part, started like ``rlhpc run``: the demo learns, and killed runs resume. Torch-free.

A run that is killed and resumed gives the numbers of an uninterrupted one, bit-equal where kernels add in a fixed
order. Two GPU kernels do not, and their cases have a bound: flash attention's backward pass accumulates a query's
gradient with atomics if a sequence has several blocks of keys, and Megatron's unpermute adds a token's outputs from its
experts with atomics.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.acceptance.results import IS_TRUE, Context, Figure, Goal
from bench.shapes import write_model
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import folders
from rlhpc.core.exits import read_starts
from rlhpc.core.files import shipped
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile, Record, repeatable
from rlhpc.data import arithmetic
from rlhpc.launch.machine import gpu_count
from rlhpc.launch.runs.run import run_here
from rlhpc.launch.worker.main import TRAINER

_SHOWN_BYTES = 16 << 10  # end of a rank's log printed after a failure
_POLL_SECONDS = 0.02


def configure(fields: Mapping[str, Any]) -> RunConfig:
    """Config from nested keys, validated like a file; of one rank, on a machine with several GPUs too, unless they set
    it; without a tracker."""
    base = {"resources": {"ranks_per_node": 1}, "observe": {"tensorboard": False}}
    return RunConfig.model_validate_json(json.dumps({**base, **fields}), strict=True)


def run(config: RunConfig, *, resume: bool = False, entry: str = TRAINER) -> list[Record]:
    """Run to the end and return the lines of metrics.jsonl. Raises RuntimeError after printing the ranks' logs."""
    code = run_here(config, resume=resume, entry=entry)
    if code:
        show_logs(config)
        raise RuntimeError(f"the run ended with exit code {code}")
    return records(config)


def run_and_kill(config: RunConfig, after_records: int) -> None:
    """Run, and kill the first rank (SIGKILL) after ``after_records`` records."""
    folder, over, killed = RunFolder(config.folder), threading.Event(), threading.Event()

    def kill() -> None:
        while not over.wait(_POLL_SECONDS):
            if len(records(config)) >= after_records:
                os.kill(read_starts(folders(folder)[-1].exits)[0].process.pid, signal.SIGKILL)
                killed.set()
                return

    watch = threading.Thread(target=kill, name="kill", daemon=True)
    watch.start()
    code = run_here(config)
    over.set()
    watch.join()
    if not killed.is_set() or code == 0:
        show_logs(config)
        raise RuntimeError(f"the run ended with exit code {code} before it was killed after {after_records} records")


def records(config: RunConfig) -> list[Record]:
    """Steps in metrics.jsonl so far."""
    return MetricsFile(RunFolder(config.folder).metrics).steps()


def show_logs(config: RunConfig) -> None:
    """Print the end of each rank's log of the last attempt."""
    for file in sorted(folders(RunFolder(config.folder))[-1].logs.glob("*.log")):
        end = file.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
        print(f"----- {file.name}\n{end}", flush=True)


# ---- the demo

DEMO = shipped("configs/demo.yaml")
ACCURACY = "validation/reward_mean"
# Bounds that hold for any seed.
MOST_AFTER_WARM_UP, LEAST_AFTER_GRPO = 0.5, 0.9
DEMO_STEPS = 60  # on a GPU; on a CPU every seed of the README's table reaches the goal in 30
_SHORT = ["resources.ranks_per_node=1", "sft.steps=15", "train.steps=2", "train.prompts_per_step=16"]


def run_demo(context: Context) -> None:
    """A model with random weights learns to add by a supervised warm-up and GRPO: train, and compare accuracy on
    held-out problems with the demo's bounds."""
    lines = run(demo_config(context))
    if context.tiny:
        losses = [record["loss"] for record in lines if record["phase"] == "sft"]
        context.report(Figure("loss, last over first supervised step", losses[-1] / losses[0], "", Goal("<", 1.0)))
        context.report(Figure("RL steps", steps(lines)))
        return
    before, after = accuracies(lines)
    most, least = Goal("<=", MOST_AFTER_WARM_UP), Goal(">=", LEAST_AFTER_GRPO)
    context.report(Figure("held-out accuracy after the warm-up", before, "", most))
    context.report(Figure("held-out accuracy after GRPO", after, "", least, f"{steps(lines)} RL steps"))
    seconds = sum(record.get("perf/step_seconds", 0.0) for record in lines)
    context.report(Figure("all steps", seconds, "s", note="without validation and startup"))


def demo_config(context: Context) -> RunConfig:
    """The demo's config for this machine. A GPU trains in bfloat16, which fused attention needs."""
    changes = [*overrides(0, context.folder / "inputs", DEMO), f"run_dir={context.folder / 'run'}"]
    if context.on_gpu:
        changes += ["model.dtype=bfloat16", f"resources.ranks_per_node={min(2, gpu_count())}"]
        changes += [f"train.steps={DEMO_STEPS}", f"checkpoint.every={DEMO_STEPS}"]
    return load_config(DEMO, [*changes, *([*_SHORT, "validation.max_prompts=32"] if context.tiny else [])])


def accuracies(lines: list[Record]) -> tuple[float, float]:
    """Accuracy on held-out problems before the first RL step and after the last."""
    found = {record["step"]: record[ACCURACY] for record in lines if record["phase"] == "rl" and ACCURACY in record}
    return found[0], found[max(found)]


def steps(lines: list[Record]) -> int:
    """Number of RL steps."""
    return max(record["step"] for record in lines if record["phase"] == "rl")


def overrides(seed: int, inputs: Path, file: Path) -> list[str]:
    """Overrides of a config of the demo's task: this seed, and inputs in the folder ``inputs``."""
    config = load_config(file).model_dump(mode="json")
    before = config["prepare"]["arguments"]["folder"]
    found = [(key, value) for key, value in _texts(config, "") if value.startswith(f"{before}/")]
    moved = [f"{key}={inputs / Path(value).relative_to(before)}" for key, value in found]
    return [f"seed={seed}", f"prepare.arguments.seed={seed}", f"prepare.arguments.folder={inputs}", *moved]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, value) of every string in a config."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, f"{key}.{name}" if key else str(name))


# ---- recovery

_BOUND = Goal("<=", 1e-2)  # relative difference of a supervised loss in bfloat16 after a few steps
_SFT_STEPS, _RL_STEPS = 3, 4
_NO_ORDER = "atomics add a token's outputs from its experts in no fixed order"


def run_recovery(context: Context) -> None:
    """Check a dense model in warm-up and RL, and a mixture of experts in a warm-up."""
    run_dense(context)
    run_experts(context)


def run_dense(context: Context) -> None:
    """Sequences of at most 32 tokens, a single block of keys: every sum has a fixed order."""
    arithmetic.make(str(context.folder / "inputs"))
    expected, found = _both(context, "dense", None, kill_after=_SFT_STEPS + 2)
    equal = found == expected
    note = f"{_SFT_STEPS} supervised and {_RL_STEPS} RL steps, killed in RL"
    context.report(Figure("dense: bit-equal", equal, "", IS_TRUE, note))
    if not equal:  # is the resume at fault, or do any two runs differ?
        again = [repeatable(record) for record in run(recovery_config(context, "dense-again", None))]
        note = "yes: the resume is at fault; no: kernels on this machine have no fixed order"
        context.report(Figure("dense: two runs without a kill are bit-equal", again == expected, note=note))
        context.report(Figure("dense: maximum difference of a supervised loss", difference(expected, found)))


def run_experts(context: Context) -> None:
    """A warm-up only: with sampled tokens, a difference in rounding would grow without bound."""
    arithmetic.make(str(context.folder / "inputs"))
    model = write_model(context.folder / "moe", "tiny-moe", dtype=context.dtype, std=0.1)
    expected, found = _both(context, "moe", model, kill_after=2)
    context.report(Figure("experts: bit-equal", found == expected, note=_NO_ORDER if context.on_gpu else ""))
    most = difference(expected, found)
    context.report(Figure("experts: maximum difference of a supervised loss", most, "", _BOUND))


def _both(context: Context, name: str, model: Path | None, kill_after: int) -> tuple[list[Record], list[Record]]:
    """Records of an uninterrupted run, and of one that is killed after ``kill_after`` records and resumed."""
    straight, resumed = (recovery_config(context, f"{name}-{way}", model) for way in ("straight", "resumed"))
    expected = run(straight)
    run_and_kill(resumed, kill_after)
    return [repeatable(record) for record in expected], [repeatable(r) for r in run(resumed, resume=True)]


def difference(expected: list[Record], found: list[Record]) -> float:
    """Maximum relative difference of a supervised loss; infinite if steps are missing."""
    pairs = [[r["loss"] for r in records if r["phase"] == "sft"] for records in (expected, found)]
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(*pairs, strict=True))


def recovery_config(context: Context, name: str, model: Path | None) -> RunConfig:
    """Config of one rank with a checkpoint after every step, without CUDA graphs, whose capture dominates startup.
    ``model``: of a warm-up only; default: the inputs' model, with RL."""
    inputs, rl = context.folder / "inputs", model is None
    sft = {"data": [str(inputs / "sft.jsonl")], "sequences_per_step": 32, "optimizer": {"learning_rate": 1e-3}}
    fields: dict[str, Any] = {
        "name": name,
        "run_dir": str(context.folder / name),
        "model": {"path": str(model or inputs / "model"), "dtype": context.dtype},
        "data": {"train": [str(inputs / "train.parquet")], "max_prompt_tokens": 16},
        "actor": {"optimizer": {"learning_rate": 5e-4}},
        "rewards": [{"function": "bench.workload:varied"}],
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12, "kv_cache_gib": 0.25, "cuda_graphs": False},
        "sft": {**sft, "steps": _SFT_STEPS if rl else _SFT_STEPS + 1},
        "train": {"steps": _RL_STEPS if rl else 0, "prompts_per_step": 16, "minibatches": 2},
        "algorithm": {"kl": {"coefficient": 0.05}},
        "checkpoint": {"every": 1},
        "recovery": {"crash": "stop"},
    }
    return configure(fields)
