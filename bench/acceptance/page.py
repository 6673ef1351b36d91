"""Renders the results of acceptance as a Markdown page. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from bench.acceptance.logs import LOG
from bench.acceptance.part import Part
from bench.acceptance.results import STATE, FigureRecord, PartRecord, Results
from rlhpc.core.text import printable
from rlhpc.plan.estimates.hardware import gpu_of_device, site_entry

COMMAND = "python -m bench.acceptance"


def page_name(results: Results) -> str:
    """``gpu-<machine>-<date>.md``, with machine and date of the newest part."""
    newest = max(results.parts.values(), key=lambda record: record.started)
    return f"gpu-{results.machines[newest.machine].slug}-{_day(results)}.md"


def render_page(results: Results, parts: Sequence[Part]) -> str:
    """Failures and missed goals first, then the machines, then every part with its figures."""
    named = [(part.name, results.parts[part.name]) for part in parts if part.name in results.parts]
    devices = dict.fromkeys(results.machines[record.machine].device for _, record in named)
    sections = [
        [f"# Acceptance on {' and '.join(devices)}, {_day(results)}"],
        [_summary(named, parts, results)],
        ["## Failures and missed goals", *_problems(named)],
        ["## Not run", *_not_run(named, parts, results.parts)],
        ["## Machine", *_machines(results)],
        *([["## For the planner", *lines]] if (lines := _planner(results)) else []),
        *([f"## {name}: {record.title}", *_part(record)] for name, record in named),
        ["## Repeat", *_repeat(named)],
    ]
    return "\n\n".join("\n\n".join(blocks) for blocks in sections) + "\n"


def _day(results: Results) -> str:
    newest = max(record.started for record in results.parts.values())
    return time.strftime("%Y-%m-%d", time.gmtime(newest))


def _summary(named: Sequence[tuple[str, PartRecord]], parts: Sequence[Part], results: Results) -> str:
    passed = sum(record.status == "passed" for _, record in named)
    figures = [figure for _, record in named for figure in record.figures if figure.goal]
    reached = sum(figure.met is True for figure in figures)
    minutes = sum(record.seconds for _, record in named) / 60
    sizes = " and ".join(dict.fromkeys(record.size for _, record in named))
    return (
        f"{passed} of {len(parts)} parts passed; {reached} of {len(figures)} goals reached; {minutes:.1f} minutes,"
        f" {sizes} sizes. `{STATE}` has the same as JSON (`{COMMAND} --schema`), `{LOG}` the parts' output."
    )


def _problems(named: Iterable[tuple[str, PartRecord]]) -> Iterator[str]:
    """A line per problem; under a failed part, its last output."""
    found = False
    for name, record in named:
        if record.failed or record.status in ("interrupted", "running"):
            found = True
            yield f"**{name}: {record.status}.** {_plain(record.message)}"
            if record.tail:
                yield "\n".join(f"    {printable(line)}" for line in record.tail)
        for figure in record.missed:
            found = True
            note = f" {_plain(figure.note)}" if figure.note else ""
            yield f"**{name}: goal missed.** {_plain(figure.name)}: {_value(figure)} (goal {_goal(figure)}).{note}"
    if not found:
        yield "None."


def _not_run(named: Sequence[tuple[str, PartRecord]], parts: Sequence[Part], started: Collection[str]) -> Iterator[str]:
    rows = [[part.name, "all", "not started yet"] for part in parts if part.name not in started]
    for name, record in named:
        if record.status == "skipped":
            rows.append([name, "all", record.message])
        rows += [[name, skipped.name, skipped.reason] for skipped in record.skipped]
    yield _table(["part", "case", "reason"], rows) if rows else "Nothing."


def _machines(results: Results) -> Iterator[str]:
    for key, machine in results.machines.items():
        fields = machine.model_dump(exclude_none=True)
        packages = fields.pop("packages")
        rows = [[name, str(value)] for name, value in fields.items()]
        rows += [[name, version] for name, version in packages.items()]
        yield f"`{key}`"
        yield _table(["what", "value"], rows)


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
    if record.figures:
        rows = [
            [figure.name, _value(figure), figure.unit, _goal(figure), _reached(figure), figure.note]
            for figure in record.figures
        ]
        yield _table(["figure", "value", "unit", "goal", "reached", "note"], rows)


def _repeat(named: Sequence[tuple[str, PartRecord]]) -> Iterator[str]:
    """Commands to run again."""
    lines = [f"{COMMAND} FOLDER            # everything, with results in FOLDER"]
    lines += [f"{COMMAND} FOLDER --part {name}" for name, record in named if record.failed or record.missed]
    lines.append(f"{COMMAND} FOLDER --retry    # failed parts, and those not run yet")
    yield "```sh\n" + "\n".join(lines) + "\n```"


def _value(figure: FigureRecord) -> str:
    value = figure.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return value


def _goal(figure: FigureRecord) -> str:
    if figure.goal is None:
        return ""
    return {"== True": "yes", "== False": "no"}.get(str(figure.goal), str(figure.goal))


def _reached(figure: FigureRecord) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure.met]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text for a table cell or a line: one line, with ``|`` escaped."""
    return printable(" ".join(text.split())).replace("|", "\\|")
