"""Rewrites the tables of docs/planning.md on ready configurations and published figures, and the README's line on the
errors of predictions.

python -m tools.published_table         # the tables
python -m tools.published_table --fit   # the pair of factors that fits all published rows best
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.config.site import EfficiencySection
from rlhpc.plan.estimates.memory import predict_memory
from rlhpc.plan.scenario import Scenario, make_scenario
from tools.markers import rewrite

ROOT = Path(__file__).parents[1]
READY = ROOT / "configs" / "ready"
PAGE, README = ROOT / "docs" / "planning.md", ROOT / "README.md"
# Settings of the published runs that differ from rlhpc's defaults: engines without CUDA graphs, weights gathered whole.
AS_PUBLISHED = ("rollout.cuda_graphs=false", "reshard.method=gather")


@dataclass(frozen=True)
class Published:
    """Published figures: seconds, and GB of a GPU and of CPU memory; None if not published."""

    file: str
    step: float
    mfu: float
    gpu_gb: float
    cpu_memory_gb: float | None = None
    rollout: float | None = None


PUBLISHED = (
    Published("deepseek-v3-671b-96gpus", 1700, 0.19, 66, 1500, 1050),
    Published("qwen3-235b-32gpus", 600, 0.25, 48, 800),
    Published("qwen2-7b-8gpus", 120, 0.35, 24),
)
_GB = 10**9
_UPDATE = ("forward and backward", "optimizer step")
_UNSEEN = ("libraries", "engine, asleep")  # not counted by torch's allocator, the source of the published figures


def ready_case(file: str, overrides: Sequence[str] = ()) -> Scenario:
    """Scenario of a ready configuration."""
    config = load_config(READY / f"{file}.yaml", overrides)
    model = config.model.model_copy(update={"path": ROOT / config.model.path})
    case = make_scenario(config.model_copy(update={"model": model}))
    assert case is not None, f"{file} names no GPU"
    return case


def published_table() -> str:
    """Markdown of predicted vs. published figures."""
    rows = ["| run | figure | published | predicted | off by |", "| --- | --- | --- | --- | --- |"]
    for row in PUBLISHED:
        rows += [
            f"| `{row.file}` | {name} | {published:,g} | {_number(found)} | {found / published - 1:+.0%} |"
            for name, published, found in figures(row)
        ]
    return "\n".join(rows) + "\n"


def summary() -> str:
    """One line with the range of relative errors of each figure over all rows."""
    off: dict[str, list[float]] = {}
    for row in PUBLISHED:
        for name, published, found in figures(row):
            off.setdefault(name.rpartition(",")[0] or name, []).append(found / published - 1)
    ranges = [f"{name.lower() if name[1].islower() else name} {_range(values)}" for name, values in off.items()]
    return f"Predicted vs. published: {'; '.join(ranges)}.\n"


def _range(values: Sequence[float]) -> str:
    return " to ".join(f"{value:+.0%}" for value in sorted({min(values), max(values)}))


def ready_table() -> str:
    """Markdown of the predictions for every ready configuration."""
    rows = [
        "| configuration | GPUs | step | rollout | updates | tokens/s | MFU of updates | GPU, GiB | CPU memory, GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for file in sorted(READY.glob("*.yaml")):
        case = ready_case(file.stem)
        step = case.step()
        memory = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
        rows.append(
            f"| [`{file.stem}`](../rlhpc/configs/ready/{file.name}) | {step.ranks} x {case.gpu.name} "
            f"| {step.seconds:,.0f} s | {step.phase('rollout').seconds:,.0f} s | {step.phase('update').seconds:,.0f} s "
            f"| {step.tokens_per_second:,.0f} | {step.mfu:.2f} | {memory.peak / 2**30:,.0f} of {case.gpu.memory_gib:g} "
            f"| {memory.cpu.node / 2**30:,.0f} |"
        )
    return "\n".join(rows) + "\n"


def figures(row: Published) -> Iterator[tuple[str, float, float]]:
    case = ready_case(row.file, AS_PUBLISHED)
    step = case.step()
    yield "step, s", row.step, step.seconds
    if row.rollout is not None:
        both = step.phase("rollout").seconds + step.phase("weight sync").seconds
        yield "rollout and weight sync, s", row.rollout, both
    yield "MFU of updates", row.mfu, step.mfu
    memory = predict_memory(case.config, case.shape, case.layout, case.gpu.memory_gib, case.gpu.reserves)
    update = max((phase for phase in memory.phases if phase.name in _UPDATE), key=lambda phase: phase.total)
    allocated = sum(size for what, size in update.parts.items() if what not in _UNSEEN)
    yield "GPU memory of updates, GB", row.gpu_gb, allocated / _GB
    if row.cpu_memory_gb is not None:
        held = memory.cpu.total - memory.cpu.parts.get("checkpoint", 0)
        yield "CPU memory between saves, GB", row.cpu_memory_gb, held * memory.cpu.ranks_per_node / _GB


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def fit() -> dict[str, float]:
    """compute and kernel_us with the least squared logarithmic errors of step, rollout and MFU over all rows."""
    cases = [(row, ready_case(row.file, AS_PUBLISHED)) for row in PUBLISHED]

    def error(compute: float, kernel: float) -> float:
        efficiency = EfficiencySection(compute=compute, kernel_us=kernel)
        total = 0.0
        for row, case in cases:
            step = replace(case, efficiency=efficiency).step()
            total += log(step.seconds / row.step) ** 2 + log(step.mfu / row.mfu) ** 2
            if row.rollout is not None:
                both = step.phase("rollout").seconds + step.phase("weight sync").seconds
                total += log(both / row.rollout) ** 2
        return total

    found, width = (0.6, 20.0), 0.5
    while width > 0.01:
        around = [exp(width * place / 2) for place in (-2, -1, 0, 1, 2)]
        found = min(
            ((min(1.0, found[0] * a), found[1] * b) for a, b in product(around, around)), key=lambda pair: error(*pair)
        )
        width *= 0.6
    return {"compute": round(found[0], 2), "kernel_us": round(found[1], 1), "error": round(error(*found), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        print(fit())
        return
    rewrite(PAGE, "published-table", published_table())
    rewrite(PAGE, "ready-table", ready_table())
    rewrite(README, "published-summary", summary())


if __name__ == "__main__":
    main()
