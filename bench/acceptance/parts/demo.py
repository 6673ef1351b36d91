"""The demo: a model with random weights learns to add by a supervised warm-up and GRPO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.acceptance.part import Context, Figure, Goal
from bench.acceptance.parts import runs
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.files import shipped
from rlhpc.core.records import Record
from rlhpc.launch.machine import gpu_count

CONFIG = shipped("configs/demo.yaml")
ACCURACY = "validation/reward_mean"
# Bounds that hold for any seed.
MOST_AFTER_WARM_UP, LEAST_AFTER_GRPO = 0.5, 0.9
_SEED = 0
_STEPS = 60  # on a GPU; on a CPU every seed of the README's table reaches the goal in 30
_TINY = [
    "resources.ranks_per_node=1",
    "sft.steps=15",
    "train.steps=2",
    "train.prompts_per_step=16",
    "validation.max_prompts=32",
]


def run(context: Context) -> None:
    """Train, and compare accuracy on held-out problems with the demo's bounds."""
    config = configured(context)
    lines = runs.run(config)
    if context.tiny:
        losses = [record["loss"] for record in lines if record["phase"] == "sft"]
        context.report(Figure("loss, last over first supervised step", losses[-1] / losses[0], "", Goal("<", 1.0)))
        context.report(Figure("RL steps", float(steps(lines))))
        return
    before, after = accuracies(lines)
    goals = Goal("<=", MOST_AFTER_WARM_UP), Goal(">=", LEAST_AFTER_GRPO)
    context.report(Figure("held-out accuracy after the warm-up", before, "", goals[0]))
    context.report(Figure("held-out accuracy after GRPO", after, "", goals[1], f"{steps(lines)} RL steps"))
    seconds = [record["perf/step_seconds"] for record in lines if "perf/step_seconds" in record]
    context.report(Figure("all steps", sum(seconds), "s", note="without validation and startup"))


def configured(context: Context) -> RunConfig:
    """The demo's config for this machine. A GPU trains in bfloat16, which fused attention needs."""
    changes = [*overrides(_SEED, context.folder / "inputs", CONFIG), f"run_dir={context.folder / 'run'}"]
    if context.on_gpu:
        changes += ["model.dtype=bfloat16", f"resources.ranks_per_node={min(2, gpu_count())}", f"train.steps={_STEPS}"]
        changes += [f"checkpoint.every={_STEPS}"]
    return load_config(CONFIG, [*changes, *(_TINY if context.tiny else [])])


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
    moved = [
        f"{key}={inputs / Path(value).relative_to(before)}"
        for key, value in _texts(config, "")
        if value.startswith(f"{before}/")
    ]
    return [f"seed={seed}", f"prepare.arguments.seed={seed}", f"prepare.arguments.folder={inputs}", *moved]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, value) of every string in a config."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, f"{key}.{name}" if key else str(name))
