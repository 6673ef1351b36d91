"""Classes of outcomes, and their table in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlhpc.core.errors import EXIT_DOES_NOT_FIT, EXIT_USER_ERROR
from tools.mutants.forked import Outcome
from tools.mutants.one_case import Case

Fault = Literal["traceback", "wrongly accepted", "wrongly refused", "over 5 s of CPU time", "over 1 GB", "not named"]
_COLUMNS: tuple[Fault, ...] = (
    "traceback",
    "wrongly accepted",
    "wrongly refused",
    "over 5 s of CPU time",
    "over 1 GB",
    "not named",
)
_ACCEPTED = (0, EXIT_DOES_NOT_FIT)  # a plan that does not fit is one
_CPU_SECONDS, _BYTES = 5.0, 10**9


@dataclass(frozen=True)
class Result:
    """One case and what is wrong with its outcome."""

    number: int
    kind: str
    what: str
    command: str
    code: int
    cpu_seconds: float
    peak_bytes: int
    faults: tuple[Fault, ...]
    text: str  # the end of the output


def judged(case: Case, outcome: Outcome) -> Result:
    """The case's result."""
    faults: list[Fault] = []
    text = outcome.text
    if outcome.code not in (*_ACCEPTED, EXIT_USER_ERROR) or "Traceback (most recent call last)" in text:
        faults.append("traceback")
    elif outcome.code in _ACCEPTED and case.wrong:
        faults.append("wrongly accepted")
    elif outcome.code == EXIT_USER_ERROR and case.what == "nothing":
        faults.append("wrongly refused")
    elif outcome.code == EXIT_USER_ERROR and case.names and not _names(case, text):
        faults.append("not named")
    if outcome.cpu_seconds > _CPU_SECONDS and case.command != "search":
        faults.append("over 5 s of CPU time")
    if outcome.peak_bytes > _BYTES:
        faults.append("over 1 GB")
    return Result(
        case.number, case.kind, case.what, " ".join(case.words)[:200], outcome.code,
        outcome.cpu_seconds, outcome.peak_bytes, tuple(faults), text[-3000:],
    )  # fmt: skip


def _names(case: Case, text: str) -> bool:
    whole = " ".join(text.split())
    return any(" ".join(name.split()) in whole or repr(name)[1:-1] in whole for name in case.names)


def table(results: Sequence[Result]) -> list[str]:
    """The table by class, and below it each case that failed."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
    rows = [_row(kind, found) for kind, found in sorted(by_kind.items())]
    heads = ["class", "cases", "refused", "accepted", *_COLUMNS, "longest, CPU s", "largest, MB"]
    lines = [_line(heads), _line(["---"] * len(heads)), *rows, _row("all", results)]
    failed = [result for result in results if result.faults]
    if failed:
        lines += ["", _line(["case", "class", "fault", "what", "last line"]), _line(["---"] * 5)]
        lines += [
            _line([result.number, result.kind, ", ".join(result.faults), result.what, _last(result)])
            for result in failed
        ]
    return lines


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


def _row(kind: str, found: Sequence[Result]) -> str:
    counts = [sum(column in result.faults for result in found) for column in _COLUMNS]
    refused = sum(result.code == EXIT_USER_ERROR for result in found)
    accepted = sum(result.code in _ACCEPTED for result in found)
    longest = max((result.cpu_seconds for result in found), default=0.0)
    largest = max((result.peak_bytes for result in found), default=0)
    return _line([kind, len(found), refused, accepted, *counts, f"{longest:.1f}", f"{largest / 1e6:.0f}"])


def _last(result: Result) -> str:
    lines = result.text.strip().splitlines()
    return lines[-1][:150] if lines else f"exit code {result.code}"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(_safe(str(cell)) for cell in cells) + " |"


def _safe(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text).replace("|", "\\|")
