"""How a memory plan looks: a table by phase, a bar for each, and what helps where one is too large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhpc.plan.estimates.memory import MemoryPlan, PhaseMemory
    from rlhpc.plan.remedies import Remedy

_GIB = 1 << 30
_BAR = 40  # characters
# Letters of the bars, by the beginning of a part's name; all else is a dot.
_LETTERS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "workspace": "A",
    "engine": "E",
    "claimed": "E",
    "KV": "K",
    "reference": "R",
    "critic": "C",
    "reward": "M",
}
_LEGEND = (
    "W weights, G gradients, O optimizer, A activations, E engine, K KV cache, R reference, C critic, M reward model"
)


def render_memory(
    plan: MemoryPlan,
    gpu_gib: float | None = None,
    remedies: Sequence[Remedy] = (),
    host_limit: tuple[str, float] | None = None,
) -> RenderableType:
    """For a terminal. ``gpu_gib`` is what bars are drawn against; without it, the fullest phase. ``host_limit``: what a
    node's host has, as the key that says so and the bytes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    limit = int(gpu_gib * _GIB) if gpu_gib else plan.gpu_bytes
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("a GPU, GiB")
    table.add_column("all", justify="right")
    table.add_column("")
    table.add_column("of which", overflow="fold")
    for phase in plan.phases:
        largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:4]
        told = ", ".join(f"{what} {_gib(size)}" for what, size in largest)
        table.add_row(phase.name, _gib(phase.total), Text(_bar(phase, limit or plan.peak)), told)
    lines = [_LEGEND, *_verdict(plan, limit), *(_remedy(remedy) for remedy in remedies)]
    if plan.first_too_large is not None and not remedies:
        lines.append(
            "  none of the usual changes is enough; `rlhpc plan search` tries other layouts, or take more nodes"
        )
    lines += _host(plan, host_limit)
    return Group(table, *(Text(line) for line in lines))


def memory_json(plan: MemoryPlan, host_limit: tuple[str, float] | None = None) -> dict[str, object]:
    """For programs, in bytes."""
    too_large = plan.first_too_large
    limit = host_limit[1] if host_limit else None
    return {
        "rank": plan.rank,
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in plan.phases},
        "host": {**plan.host.parts, "node": plan.host.node, "limit": limit},
        "first_too_large": too_large.name if too_large else None,
    }


def _bar(phase: PhaseMemory, limit: int) -> str:
    """Parts to scale; beyond the GPU's end a bar."""
    letters: dict[str, int] = {}
    for what, size in phase.parts.items():
        letter = next((letter for begin, letter in _LETTERS.items() if what.startswith(begin)), ".")
        letters[letter] = letters.get(letter, 0) + size
    text, done = "", 0
    for letter, size in letters.items():
        done += size
        text += letter * (round(done * _BAR / limit) - len(text))
    return f"{text[:_BAR]:<{_BAR}}|{'>' if done > limit else ''}"


def _verdict(plan: MemoryPlan, limit: int | None) -> list[str]:
    if limit is None:
        return [f"rank {plan.rank} needs most, {_gib(plan.peak)} GiB; name a GPU to see whether that fits"]
    too_large = next((phase for phase in plan.phases if phase.total > limit), None)
    if too_large is None:
        return [f"rank {plan.rank} needs most, {_gib(plan.peak)} of {_gib(limit)} GiB"]
    missing = too_large.total - limit
    return [f"DOES NOT FIT: {too_large.name} on rank {plan.rank} needs {_gib(missing)} GiB more than {_gib(limit)}"]


def _host(plan: MemoryPlan, limit: tuple[str, float] | None) -> list[str]:
    parts = ", ".join(f"{what} {_gib(size)}" for what, size in plan.host.parts.items())
    ranks, of = plan.host.ranks_per_node, f" of {_gib(limit[1])}" if limit else ""
    lines = [f"host: {_gib(plan.host.node)}{of} GiB a node, {ranks} rank(s) of {_gib(plan.host.total)}: {parts}"]
    if limit and plan.host.node > limit[1]:
        missing = _gib(plan.host.node - limit[1])
        lines.append(
            f"DOES NOT FIT: a node's host needs {missing} GiB more than {limit[0]} says it has; raise that, take more "
            "nodes or offload less (memory.offload, train.optimizer.optimizer_offload_fraction)"
        )
    return lines


def _remedy(remedy: Remedy) -> str:
    left = remedy.plan.first_too_large
    then = f"but then {left.name} needs {_gib(left.total)} GiB" if left else f"at most {_gib(remedy.plan.peak)} GiB"
    return f"  {'helps' if left else 'fits with'}  {remedy.text}  ({then})"


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f}"
