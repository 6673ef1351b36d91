"""Recovery: a run that is killed and resumed gives the numbers of an uninterrupted one.

Bit-equal where kernels add in a fixed order. Two GPU kernels do not, and their cases have a bound: flash attention's
backward pass accumulates a query's gradient with atomics if a sequence has several blocks of keys, and Megatron's
unpermute adds a token's outputs from its experts with atomics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.acceptance.part import IS_TRUE, Context, Figure, Goal
from bench.acceptance.parts import rig, runs
from bench.acceptance.parts.models import write_model
from rlhpc.config.schema import RunConfig
from rlhpc.core.records import Record, repeatable
from rlhpc.data import arithmetic

# Relative difference of a supervised loss in bfloat16 after a few steps.
BOUND = 1e-2
_SFT_STEPS, _RL_STEPS = 3, 4
_NO_ORDER = "atomics add a token's outputs from its experts in no fixed order"


def run(context: Context) -> None:
    """Check a dense model in warm-up and RL, and a mixture of experts in a warm-up."""
    run_dense(context)
    run_experts(context)


def run_dense(context: Context) -> None:
    """Sequences of at most 32 tokens, a single block of keys: every sum has a fixed order."""
    arithmetic.make(str(context.folder / "inputs"))
    straight, resumed = (run_config(context, f"dense-{name}", rl=True) for name in ("straight", "resumed"))
    expected, found = _both(straight, resumed, kill_after=_SFT_STEPS + 2)
    equal = found == expected
    note = f"{_SFT_STEPS} supervised and {_RL_STEPS} RL steps, killed in RL"
    context.report(Figure("dense: bit-equal", equal, "", IS_TRUE, note))
    if not equal:  # is the resume at fault, or do any two runs differ?
        again = [repeatable(record) for record in runs.run(run_config(context, "dense-again", rl=True))]
        note = "yes: the resume is at fault; no: kernels on this machine have no fixed order"
        context.report(Figure("dense: two runs without a kill are bit-equal", again == expected, note=note))
        context.report(Figure("dense: maximum difference of a supervised loss", difference(expected, found)))


def run_experts(context: Context) -> None:
    """A warm-up only: with sampled tokens, a difference in rounding would grow without bound."""
    arithmetic.make(str(context.folder / "inputs"))
    model = write_model(context.folder / "moe", "tiny-moe", dtype=rig.dtype_of(context), std=0.1)
    straight, resumed = (run_config(context, f"moe-{name}", model, rl=False) for name in ("straight", "resumed"))
    expected, found = _both(straight, resumed, kill_after=2)
    context.report(Figure("experts: bit-equal", found == expected, note=_NO_ORDER if context.on_gpu else ""))
    most = difference(expected, found)
    context.report(Figure("experts: maximum difference of a supervised loss", most, "", Goal("<=", BOUND)))


def _both(straight: RunConfig, resumed: RunConfig, kill_after: int) -> tuple[list[Record], list[Record]]:
    """Records of an uninterrupted run, and of one that is killed after ``kill_after`` records and resumed."""
    expected = runs.run(straight)
    runs.run_and_kill(resumed, kill_after)
    return [repeatable(record) for record in expected], [repeatable(r) for r in runs.run(resumed, resume=True)]


def difference(expected: list[Record], found: list[Record]) -> float:
    """Maximum relative difference of a supervised loss; infinite if steps are missing."""
    pairs = [[r["loss"] for r in records if r["phase"] == "sft"] for records in (expected, found)]
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(*pairs, strict=True))


def run_config(context: Context, name: str, model: Path | None = None, *, rl: bool) -> RunConfig:
    """Config of one rank with a checkpoint after every step, without CUDA graphs, whose capture dominates startup."""
    inputs = context.folder / "inputs"
    fields: dict[str, Any] = {
        "name": name,
        "run_dir": str(context.folder / name),
        "model": {"path": str(model or inputs / "model"), "dtype": rig.dtype_of(context)},
        "data": {"train": [str(inputs / "train.parquet")], "max_prompt_tokens": 16},
        "actor": {"optimizer": {"learning_rate": 5e-4}},
        "rewards": [{"function": "bench.acceptance.parts.rewards:varied"}],
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
