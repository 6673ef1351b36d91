"""Renders the results of acceptance as a Markdown page. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from bench.acceptance.results import STATE, Figure, Part, PartRecord, Results
from rlhpc.core.text import printable
from rlhpc.plan.estimates.hardware import gpu_of_device, site_entry

COMMAND = "python -m bench.acceptance"
Named = Sequence[tuple[str, PartRecord]]


def page_name(results: Results) -> str:
    """``gpu-<machine>-<date>.md``, with machine and date of the newest part."""
    newest = max(results.parts.values(), key=lambda record: record.started)
    return f"gpu-{results.machines[newest.machine].slug}-{_day(results)}.md"


def render_page(results: Results, parts: Sequence[Part], log: str) -> str:
    """Failures and missed goals first, then the machines, then every part with its figures."""
    named = [(part.name, results.parts[part.name]) for part in parts if part.name in results.parts]
    devices = dict.fromkeys(results.machines[record.machine].device for _, record in named)
    sections = [
        [f"# Acceptance on {' and '.join(devices)}, {_day(results)}"],
        [_summary(named, len(parts), log)],
        ["## Failures and missed goals", *(list(_problems(named)) or ["None."])],
        ["## Not run", _not_run(named, [part.name for part in parts if part.name not in results.parts])],
        ["## Machine", *_machines(results)],
        *([["## For the planner", *lines]] if (lines := _planner(results)) else []),
        *([f"## {name}: {record.title}", *_part(record)] for name, record in named),
    ]
    return "\n\n".join("\n\n".join(blocks) for blocks in sections) + "\n"


def _day(results: Results) -> str:
    newest = max(record.started for record in results.parts.values())
    return time.strftime("%Y-%m-%d", time.gmtime(newest))


def _summary(named: Named, parts: int, log: str) -> str:
    passed = sum(record.status == "passed" for _, record in named)
    goals = [figure.met for _, record in named for figure in record.figures if figure.goal]
    minutes = sum(record.seconds for _, record in named) / 60
    sizes = " and ".join(dict.fromkeys(record.size for _, record in named))
    reached = f"{passed} of {parts} parts passed; {sum(map(bool, goals))} of {len(goals)} goals reached"
    where = f"`{STATE}` has the same as JSON (`{COMMAND} --schema`), `{log}` the parts' output."
    return f"{reached}; {minutes:.1f} minutes, {sizes} sizes. {where}"


def _problems(named: Named) -> Iterator[str]:
    """A line per problem; under a failed part, its last output."""
    for name, record in named:
        if record.status not in ("passed", "skipped"):
            yield f"**{name}: {record.status}.** {_plain(record.message)}"
            if record.tail:
                yield "\n".join(f"    {printable(line)}" for line in record.tail)
        for figure in record.missed:
            note = f" {_plain(figure.note)}" if figure.note else ""
            yield f"**{name}: goal missed.** {_plain(figure.name)}: {_value(figure)} (goal {_goal(figure)}).{note}"


def _not_run(named: Named, later: Sequence[str]) -> str:
    rows = [[name, "all", "not started yet"] for name in later]
    for name, record in named:
        rows += [[name, "all", record.message]] if record.status == "skipped" else []
        rows += [[name, skipped.name, skipped.reason] for skipped in record.skipped]
    return _table(["part", "case", "reason"], rows) if rows else "Nothing."


def _machines(results: Results) -> Iterator[str]:
    for key, machine in results.machines.items():
        fields = machine.model_dump(exclude_none=True)
        fields |= fields.pop("packages")
        yield f"`{key}`"
        yield _table(["what", "value"], [[name, str(value)] for name, value in fields.items()])


def _planner(results: Results) -> list[str]:
    """Lines for the site file; none without figures of a GPU."""
    record = results.parts.get("weight_sync")
    machine = results.machines[record.machine] if record else None
    gpu = gpu_of_device(machine.gpu) if machine and machine.gpu else None
    if record is None or machine is None or gpu is None or record.size != "full":
        return []
    figures = {figure.name: figure.value for figure in record.figures if isinstance(figure.value, float)}
    text = site_entry(gpu.name, figures, machine.driver)
    return [f"Lines for the site file, measured here:\n\n```yaml\n{text}```"] if text else []


def _part(record: PartRecord) -> Iterator[str]:
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.started))
    yield (
        f"{record.status} in {record.seconds:.0f} s of at most {60 * record.limit_minutes:.0f} s, {record.size} sizes,"
        f" on `{record.machine}`, {started}."
    )
    reached = {True: "yes", False: "**no**", None: ""}
    rows = [[one.name, _value(one), one.unit, _goal(one), reached[one.met], one.note] for one in record.figures]
    if rows:
        yield _table(["figure", "value", "unit", "goal", "reached", "note"], rows)


def _value(figure: Figure) -> str:
    value = figure.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return value


def _goal(figure: Figure) -> str:
    goal = str(figure.goal or "")
    return {"== True": "yes", "== False": "no"}.get(goal, goal)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text for a table cell or a line: one line, with ``|`` escaped."""
    return printable(" ".join(text.split())).replace("|", "\\|")
