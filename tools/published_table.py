"""Rewrites the tables of predicted vs. published figures in docs/measurements, and in docs/planning.md the line on
their errors and the table of ready configurations.

python -m tools.published_table         # the tables
python -m tools.published_table --fit   # the factors that fit verl's rows best
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.site import EfficiencySection
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.estimates.rollout_time import DECODING_KERNELS
from rlhpc.plan.estimates.roofline import RLHPC, KernelCounts
from rlhpc.plan.estimates.train_time import EXPERT_SPREAD
from rlhpc.plan.scenario import Scenario, make_scenario
from tools.markers import rewrite
from tools.published_runs import BLIND, FITTED, HELD_OUT, OUTSIDE, READY, ROOT, Published, own_operations

PAGE = ROOT / "docs" / "planning.md"
MEASUREMENTS = ROOT / "docs" / "measurements" / "2026-11-predictions.md"
_GB = 10**9
_UPDATE = ("forward and backward", "optimizer step")
_UNSEEN = ("libraries", "engine, asleep")  # not counted by torch's allocator, the source of the published figures
_FITTED = ("compute", "kernel_us")
# Of Megatron-Core with Transformer Engine's fused kernels, which verl and NeMo-RL use: two norms of two passes each,
# two sums of residual and output of three, rotation of queries and keys, and norms of heads. Activation: two read, one
# written. The loss moves about 58 bytes of a logit: to float32, maximum, difference, exponential, sum, gradient.
# Products add their result to the gradient.
TRANSFORMER_ENGINE = KernelCounts(
    hidden_passes=13,
    feed_forward_passes=3,
    expert_passes=6,
    logit_bytes=20,
    head_again=0,
    gradient_bytes=8,
    update_bytes=30,
    dense_kernels=16,
    latent_kernels=14,
    expert_kernels=30,
)


def ready_case(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Scenario of a configuration in a file."""
    config = load_config(path, overrides)
    model = config.model.model_copy(update={"path": ROOT / config.model.path})
    case = make_scenario(config.model_copy(update={"model": model}))
    assert case is not None, f"{path} names no GPU"
    return case


def published_case(row: Published) -> Scenario:
    """Scenario of a published run: its framework's kernels, and weight syncs of whole tensors."""
    case = ready_case(row.path, ("reshard.method=gather", *row.settings))
    return replace(case, kernels=TRANSFORMER_ENGINE)


def published_table(rows: Sequence[Published]) -> str:
    """Markdown of predicted vs. published figures."""
    lines = ["| run | figure | published | predicted | off by |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        lines += [
            f"| {row.link} | {name} | {published:,g} | {_number(found)} | {found / published - 1:+.0%} |"
            for name, published, found in figures(row)
        ]
    return "\n".join(lines) + "\n"


def summary() -> str:
    """One line with the range of relative errors of each figure over all rows."""
    fitted = f"Predicted vs. published: {'; '.join(_ranges(FITTED))}."
    return f"{fitted} Runs that no factor was fitted on: {'; '.join(_ranges((*HELD_OUT, *BLIND)))}.\n"


def _ranges(rows: Sequence[Published]) -> list[str]:
    off: dict[str, list[float]] = {}
    for row in rows:
        for name, published, found in figures(row):
            off.setdefault(name.rpartition(",")[0] or name, []).append(found / published - 1)
    return [f"{name.lower() if name[1].islower() else name} {_range(values)}" for name, values in off.items()]


def _range(values: Sequence[float]) -> str:
    return " to ".join(f"{value:+.0%}" for value in sorted({min(values), max(values)}))


def constants_table() -> str:
    """Markdown of the predictions' constants, with each one's origin."""
    lines = ["| constant | rlhpc | Transformer Engine | origin |", "| --- | --- | --- | --- |"]
    for name, value in EfficiencySection().model_dump(exclude={"phases"}).items():
        origin = "fitted on the first table's runs" if name in _FITTED else "usual value"
        lines.append(f"| `site.efficiency.{name}` | {value:g} | {value:g} | {origin} |")
    lines.append(f"| share of a published step outside of models | | {OUTSIDE:g} | fitted on the first table's runs |")
    lines.append(f"| spread of experts' loads | {EXPERT_SPREAD:g} | {EXPERT_SPREAD:g} | usual value |")
    for name, value in asdict(RLHPC).items():
        lines.append(f"| `KernelCounts.{name}` | {value:g} | {getattr(TRANSFORMER_ENGINE, name):g} | counted |")
    for name, value in DECODING_KERNELS.items():
        lines.append(f"| vLLM's kernels in a decoding layer, {name} | {value:g} | {value:g} | counted |")
    return "\n".join(lines) + "\n"


def ready_table() -> str:
    """Markdown of the predictions for every ready configuration."""
    rows = [
        "| configuration | GPUs | step | tokens/s | MFU of updates | GPU, GiB | CPU memory, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for file in sorted(READY.glob("*.yaml")):
        case = ready_case(file)
        step = case.step()
        memory = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
        rows.append(
            f"| [`{file.stem}`](../rlhpc/configs/ready/{file.name}) | {step.ranks} x {case.gpu.name} "
            f"| {step.seconds:,.0f} s "
            f"| {step.tokens_per_second:,.0f} | {step.mfu:.2f} | {memory.peak / 2**30:,.0f} of {case.gpu.memory_gib:g} "
            f"| {memory.cpu.node / 2**30:,.0f} |"
        )
    return "\n".join(rows) + "\n"


def figures(row: Published) -> Iterator[tuple[str, float, float]]:
    """Yields each published figure's name, its value and the prediction."""
    case = published_case(row)
    yield from time_figures(row, case)
    if row.gpu_gb is None:
        return
    memory = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
    update = max((phase for phase in memory.phases if phase.name in _UPDATE), key=lambda phase: phase.total)
    allocated = sum(size for what, size in update.parts.items() if what not in _UNSEEN)
    yield "GPU memory of updates, GB", row.gpu_gb, allocated / _GB
    if row.cpu_memory_gb is not None:
        held = memory.cpu.total - memory.cpu.parts.get("checkpoint", 0)
        yield "CPU memory between saves, GB", row.cpu_memory_gb, held * memory.cpu.ranks_per_node / _GB


def time_figures(row: Published, case: Scenario, outside: float = OUTSIDE) -> Iterator[tuple[str, float, float]]:
    """Yields the figures of time. MFU is in the publisher's count of operations."""
    step = case.step()
    if row.step is not None:
        yield "step, s", row.step, step.seconds / (1 - outside)
    if row.rollout is not None:
        both = step.phase("rollout").seconds + step.phase("weight sync").seconds
        yield "rollout and weight sync, s", row.rollout, both
    if row.mfu is not None:
        of_token = row.operations(case.shape, step.work.pairs), own_operations(case.shape, step.work.pairs)
        yield "MFU of updates", row.mfu, step.mfu * of_token[0] / of_token[1]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def fit_error(compute: float, kernel: float) -> tuple[float, float]:
    """The sum of squared logarithmic errors of step, rollout and MFU over fitted rows, with the best share of a step
    outside of models, and that share."""
    efficiency = EfficiencySection(compute=compute, kernel_us=kernel)
    found = [
        (name, published, value)
        for row, case in _fitted_cases()
        for name, published, value in time_figures(row, replace(case, efficiency=efficiency), outside=0.0)
    ]
    shares = (percent / 100 for percent in range(40))
    return min((sum(_squared(*figure, share) for figure in found), share) for share in shares)


@cache
def _fitted_cases() -> tuple[tuple[Published, Scenario], ...]:
    return tuple((row, published_case(row)) for row in FITTED)


def fit() -> dict[str, float]:
    """compute, kernel_us and the share of a step outside of models with the least error."""
    found, width = (0.6, 20.0), 0.5
    while width > 0.01:
        around = [exp(width * place / 2) for place in (-2, -1, 0, 1, 2)]
        found = min(
            ((min(1.0, found[0] * a), found[1] * b) for a, b in product(around, around)),
            key=lambda pair: fit_error(*pair),
        )
        width *= 0.6
    squares, share = fit_error(*found)
    factors = {"compute": round(found[0], 2), "kernel_us": round(found[1], 1)}
    return {**factors, "outside": share, "error": round(squares, 4)}


def _squared(name: str, published: float, predicted: float, outside: float) -> float:
    """Squared logarithm of the relative error; of a step, with a share outside of models."""
    return log(predicted / (1 - outside if name.startswith("step") else 1) / published) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        print(fit())
        return
    rewrite(MEASUREMENTS, "published-table", published_table(FITTED))
    rewrite(MEASUREMENTS, "held-out-table", published_table(HELD_OUT))
    rewrite(MEASUREMENTS, "blind-table", published_table(BLIND))
    rewrite(MEASUREMENTS, "constants-table", constants_table())
    rewrite(PAGE, "ready-table", ready_table())
    rewrite(PAGE, "published-summary", summary())


if __name__ == "__main__":
    main()
