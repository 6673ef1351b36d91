"""Recovery: a run that is killed and resumed gives the numbers of one that was left alone.

Bit-equal wherever kernels add in a fixed order. Two do not on a GPU, and their cases have a bound: flash attention's
backward pass adds the parts of a query's gradient with atomics once a sequence has several blocks of keys, and a
token's outputs from its experts are added with atomics (Megatron's unpermute).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.records import Record
from rlhpc.data import arithmetic
from rlhpc.site.acceptance.part import Context, Figure, Goal
from rlhpc.site.acceptance.parts import runs
from rlhpc.site.acceptance.parts.models import write_model

# Relative difference of a supervised loss, in bfloat16, within a few steps.
BOUND = 1e-2
_SFT_STEPS, _RL_STEPS = 3, 4
_NO_ORDER = "a token's outputs from its experts are added with atomics, in no fixed order"


def run(context: Context) -> None:
    """A dense model through warm-up and RL, then a mixture of experts through a warm-up."""
    run_dense(context)
    run_experts(context)


def run_dense(context: Context) -> None:
    """Sequences of at most 32 tokens, one block of keys: nothing is added in an order of its own."""
    arithmetic.make(str(context.folder / "inputs"))
    straight, resumed = (run_config(context, f"dense-{name}", rl=True) for name in ("straight", "resumed"))
    expected, found = _both(straight, resumed, kill_after=_SFT_STEPS + 2)
    equal = found == expected
    note = f"{_SFT_STEPS} supervised and {_RL_STEPS} RL steps, killed in RL"
    context.report(Figure("dense: bit-equal", equal, "", Goal("==", True), note))
    if not equal:  # is it the resume, or do two runs differ anyway?
        again = [_numbers(record) for record in runs.run(run_config(context, "dense-again", rl=True))]
        note = "yes: the resume is at fault; no: kernels on this machine have no fixed order"
        context.report(Figure("dense: two runs without a kill are bit-equal", again == expected, note=note))
        context.report(Figure("dense: largest difference of a supervised loss", difference(expected, found)))


def run_experts(context: Context) -> None:
    """A warm-up alone: with sampled tokens a first difference in rounding would grow without bound."""
    arithmetic.make(str(context.folder / "inputs"))
    model = write_model(context.folder / "moe", "tiny-moe", dtype=_dtype(context), std=0.1)
    straight, resumed = (run_config(context, f"moe-{name}", model, rl=False) for name in ("straight", "resumed"))
    expected, found = _both(straight, resumed, kill_after=2)
    context.report(Figure("experts: bit-equal", found == expected, note=_NO_ORDER if context.on_gpu else ""))
    most = difference(expected, found)
    context.report(Figure("experts: largest difference of a supervised loss", most, "", Goal("<=", BOUND)))


def _both(straight: RunConfig, resumed: RunConfig, kill_after: int) -> tuple[list[Record], list[Record]]:
    """Records of the run that is left alone, and of the one that is killed after so many and resumed."""
    expected = runs.run(straight)
    runs.run_and_kill(resumed, kill_after)
    return [_numbers(record) for record in expected], [_numbers(r) for r in runs.run(resumed, resume=True)]


def _numbers(record: Record) -> Record:
    """All that is not a time."""
    return {name: value for name, value in record.items() if not name.startswith("perf/") and name != "time"}


def difference(expected: list[Record], found: list[Record]) -> float:
    """The largest relative one of a supervised loss; infinite where steps are missing."""
    pairs = [[r["loss"] for r in records if r["phase"] == "sft"] for records in (expected, found)]
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(*pairs, strict=True))


def _dtype(context: Context) -> str:
    return "bfloat16" if context.on_gpu else "float32"


def run_config(context: Context, name: str, model: Path | None = None, *, rl: bool) -> RunConfig:
    """One rank, a checkpoint after every step. Without CUDA graphs, whose capture takes most of a start."""
    inputs = context.folder / "inputs"
    fields: dict[str, Any] = {
        "name": name,
        "run_dir": str(context.folder / name),
        "model": {"path": str(model or inputs / "model"), "dtype": _dtype(context)},
        "data": {"train": [str(inputs / "train.parquet")], "max_prompt_tokens": 16},
        "actor": {"optimizer": {"learning_rate": 5e-4}},
        "rewards": [{"function": "rlhpc.site.acceptance.parts.rewards:varied"}],
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 12, "kv_cache_gib": 0.25, "cuda_graphs": False},
        "sft": {
            "data": [str(inputs / "sft.jsonl")],
            "steps": _SFT_STEPS if rl else _SFT_STEPS + 1,
            "sequences_per_step": 32,
            "optimizer": {"learning_rate": 1e-3},
        },
        "train": {
            "steps": _RL_STEPS if rl else 0,
            "prompts_per_step": 16,
            "minibatches": 2,
        },
        "algorithm": {"kl": {"coefficient": 0.05}},
        "checkpoint": {"every": 1},
        "observe": {"tensorboard": False},
    }
    return runs.configure(fields)
