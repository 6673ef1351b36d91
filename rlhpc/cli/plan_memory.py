"""Text and JSON of a memory plan: a table by phase with bars, and what helps where one is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlhpc.plan.estimates.memory import MemoryPlan
    from rlhpc.plan.estimates.phase_memory import PhaseMemory
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
    cpu_memory_limit: tuple[str, float] | None = None,
) -> RenderableType:
    """Table for a terminal. Bars have the scale of ``gpu_gib``, or of the fullest phase if that is larger.
    ``cpu_memory_limit``: that of a node, as the key that sets it and bytes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    limit = int(gpu_gib * _GIB) if gpu_gib else plan.gpu_bytes
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("a GPU, GiB")
    table.add_column("all", justify="right")
    table.add_column("")
    table.add_column("of which", overflow="fold")
    for rank, phases in plan.by_rank.items():
        if plan.engine_rank is not None:
            does = {plan.engine_rank: "generates", plan.judge_rank: "judges"}.get(rank, "trains")
            table.add_row(f"rank {rank}, {does}", "", "", "")
        for phase in phases:
            largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:4]
            parts = ", ".join(f"{what} {_gib(size)}" for what, size in largest)
            table.add_row(phase.name, _gib(phase.total), Text(_bar(phase, limit or plan.peak, plan.peak)), parts)
    lines = [_LEGEND, *_verdict(plan, limit), *(_remedy(remedy) for remedy in remedies)]
    if plan.first_too_large is not None and not remedies:
        lines.append("  no usual change is enough: try other layouts with `rlhpc plan search`, or take more nodes")
    lines += _cpu_lines(plan, cpu_memory_limit)
    return Group(table, *(Text(line) for line in lines))


def memory_json(plan: MemoryPlan, cpu_memory_limit: tuple[str, float] | None = None) -> dict[str, object]:
    """The plan, in bytes."""
    too_large = plan.first_too_large
    limit = cpu_memory_limit[1] if cpu_memory_limit else None
    return {
        "rank": plan.rank,
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in plan.phases},
        "cpu": {**plan.cpu.parts, "node": plan.cpu.node, "limit": limit},
        "first_too_large": too_large.name if too_large else None,
        **({} if plan.engine_rank is None else _role_json(plan, "engines", plan.engine_rank, plan.cpu.engine_parts)),
        **({} if plan.judge_rank is None else _role_json(plan, "judges", plan.judge_rank, plan.cpu.judge_parts)),
    }


def _role_json(plan: MemoryPlan, role: str, rank: int, cpu: Mapping[str, int]) -> dict[str, object]:
    """Which phases are of a rank that generates or judges, and its CPU memory."""
    phases = [phase.name for phase in plan.by_rank.get(rank, ())]
    return {role: {"rank": rank, "phases": phases, "cpu": dict(cpu)}}


def _bar(phase: PhaseMemory, limit: int, peak: int) -> str:
    """Bar of the parts to scale, with the GPU's memory as a line that larger phases cross."""
    letters: dict[str, int] = {}
    for what, size in phase.parts.items():
        letter = next((letter for begin, letter in _LETTERS.items() if what.startswith(begin)), ".")
        letters[letter] = letters.get(letter, 0) + size
    text, done, scale = "", 0, _BAR / max(limit, peak)
    for letter, size in letters.items():
        done += size
        text += letter * (round(done * scale) - len(text))
    mark = round(limit * scale)
    if done > limit and len(text) <= mark:  # by less than a letter
        text = f"{text:<{mark}}>"
    return f"{text[:mark]:<{mark}}|{text[mark:]}"


def _verdict(plan: MemoryPlan, limit: int | None) -> list[str]:
    tops = {rank: max(phase.total for phase in phases) for rank, phases in plan.by_rank.items()}
    most = "; ".join(f"rank {rank} needs most, {_gib(top)}" + ("" if limit else " GiB") for rank, top in tops.items())
    if limit is None:
        return [f"{most}; name a GPU to check whether that fits"]
    too_large = next((phase for phase in plan.phases if phase.total > limit), None)
    if too_large is None:
        return [f"{most} of {_gib(limit)} GiB"]
    missing, where = too_large.total - limit, f"{too_large.name} on rank {plan.rank_of(too_large)}"
    return [f"DOES NOT FIT: {where} needs {_gib(missing)} GiB more than {_gib(limit)}"]


def _cpu_lines(plan: MemoryPlan, limit: tuple[str, float] | None) -> list[str]:
    cpu, of = plan.cpu, f" of {_gib(limit[1])}" if limit else ""
    trains, generates, *judging = cpu.fullest
    words = [_cpu_words(trains, cpu.total, cpu.parts)] if trains else []
    words += [_cpu_words(generates, cpu.engine_total, cpu.engine_parts, " that generate(s)")] if generates else []
    words += [_cpu_words(count, cpu.judge_total, cpu.judge_parts, " of judges") for count in judging if count]
    lines = [f"CPU memory: {_gib(cpu.node)}{of} GiB a node, {'; '.join(words)}"]
    if limit and plan.cpu.node > limit[1]:
        missing = _gib(plan.cpu.node - limit[1])
        lines.append(
            f"DOES NOT FIT: a node needs {missing} GiB of CPU memory more than {limit[0]}; raise that, take more "
            "nodes or offload less (actor.memory.offload, actor.optimizer.optimizer_offload_fraction)"
        )
    return lines


def _cpu_words(ranks: int, total: int, parts: Mapping[str, int], which: str = "") -> str:
    named = ", ".join(f"{what} {_gib(size)}" for what, size in parts.items())
    return f"{ranks} rank(s){which} of {_gib(total)}: {named}"


def _remedy(remedy: Remedy) -> str:
    left = remedy.plan.first_too_large
    then = f"but then {left.name} needs {_gib(left.total)} GiB" if left else f"at most {_gib(remedy.plan.peak)} GiB"
    return f"  {'helps' if left else 'fits with'}  {remedy.text}  ({then})"


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f}"
