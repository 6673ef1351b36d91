"""Samples of validations and of training steps: where ``rlhpc samples`` finds them, and their text for a terminal.

Control characters are replaced: a response is written by a model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number
from rlhpc.core.terminal import Terminal
from rlhpc.core.text import printable
from rlhpc.launch.runs.run_registry import RunEntry, find_run
from rlhpc.observe.sample_choice import is_wrong, mean_reward
from rlhpc.observe.training_samples import file_of, kept_steps, read_file

if TYPE_CHECKING:
    from rlhpc.observe.sample_choice import Pair

Record = dict[str, Any]
Mark = tuple[int, int]  # a step, and a number that changes when its samples do
_REMEDIES = {
    "validation": "wait for the first validation, which needs data.validation, or add --training",
    "training": "wait for the first step; observe.training_samples must be on",
}
_FILES = "give a run, or a file of its folder training_samples"


@dataclass(frozen=True)
class Source:
    """Samples of one kind. ``path`` is their file, or None for those of ``run``."""

    kind: Literal["validation", "training"]
    path: Path | None
    run: RunEntry | None

    @property
    def _folder(self) -> RunFolder:
        assert self.run is not None
        return self.run.folder

    def file(self, step: int) -> Path:
        """File with the samples of a step."""
        if self.path is not None:
            return self.path
        return self._folder.samples if self.kind == "validation" else file_of(self._folder, step)

    def steps(self) -> list[int]:
        """Steps that have samples, in order."""
        return sorted({step for step, _ in self.marks()})

    def marks(self) -> list[Mark]:
        """The same, each with a number that changes when a resumed run writes it again."""
        if self.kind == "validation":
            counts: dict[int, int] = {}
            for record in _read_lines(self.file(0)):
                counts[record["step"]] = counts.get(record["step"], 0) + 1
            return sorted(counts.items())
        if self.path is not None:
            return sorted({(int(record["step"]), 0) for record in self._rows})
        found = []
        for step in kept_steps(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed to stay within the bound
                found.append((step, file_of(self._folder, step).stat().st_mtime_ns))
        return found

    def step(self, asked: int | None) -> int:
        """The step asked for, or the last one. Raises UserError if it has no samples."""
        there = self.steps()
        step = (there[-1] if there else 0) if asked is None else asked
        if step in there:
            return step
        if not there and self.kind == "training":
            raise _none_yet(self.kind, str(self._folder.path))
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"no samples of step {step}", where=str(self._where), remedy=f"steps with samples: {names}")

    def read(self, step: int) -> list[Record]:
        """Samples of a step, in the order that they were written in."""
        if self.kind == "validation":
            return [record for record in _read_lines(self.file(step)) if record["step"] == step]
        rows = self._rows if self.path is not None else _read_rows(file_of(self._folder, step))
        return [row for row in rows if row["step"] == step]

    @property
    def _where(self) -> Path:
        if self.path is not None or self.kind == "validation":
            return self.file(0)
        return self._folder.training_samples

    @cached_property
    def _rows(self) -> list[Record]:
        assert self.path is not None
        return _read_rows(self.path)


def find_source(text: str, *, training: bool) -> Source:
    """Samples of a file, or of a run. Raises UserError if there are none."""
    path = Path(text)
    if path.is_file():
        return Source("training" if path.suffix == ".parquet" else "validation", path, None)
    run = find_run(text)
    kind: Literal["validation", "training"] = "training" if training else "validation"
    there = run.folder.training_samples.is_dir() if training else run.folder.samples.is_file()
    if not there:
        raise _none_yet(kind, text)
    return Source(kind, None, run)


def _none_yet(kind: str, where: str) -> UserError:
    return UserError(f"no {'training ' * (kind == 'training')}samples yet", where=where, remedy=_REMEDIES[kind])


def _read_lines(file: Path) -> Iterator[Record]:
    """Records of the complete lines."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for place, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                known = _is_sample(record)
            except (ValueError, RecursionError):
                known = False
            if not known:
                raise UserError("not a sample", where=f"{file}:{place}", remedy="give a run or its samples.jsonl")
            yield record


def _is_sample(record: Any) -> bool:
    """True if it has a step and a reward."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    return number(record.get("reward")) is not None and isinstance(record.get("parts") or {}, dict)


def _read_rows(file: Path) -> list[Record]:
    try:
        rows = read_file(file)
    except (ModuleNotFoundError, FileNotFoundError):
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise UserError(f"no file of samples ({type(error).__name__})", where=str(file), remedy=_FILES) from None
    if not all(map(_is_sample, rows)):
        raise UserError("no file of samples", where=str(file), remedy=_FILES)
    return rows


_Row = Mapping[str, Any]

_LABEL = 10  # characters
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NUMBERS = {
    "advantage": "advantage {:.3g}",
    "response_length": "{} tokens",
    "policy_version": "version {}",
    "logprob_mean": "log-prob {:.3g}",
    "logprob_diff_mean": "difference {:.2g}",
}


def show_samples(records: Sequence[_Row]) -> None:
    """Each sample below a line with its numbers."""
    console = Terminal()
    for place, record in enumerate(records, 1):
        console.print(_rule(f"{place} | {_headline(record)}", record))
        console.print(_field("prompt", record.get("prompt", "")))
        for line in _conversation(record):
            console.print(line)
        console.print(_field("expected", record.get("expected", "")))


def show_pairs(pairs: Sequence[Pair], steps: tuple[int, int]) -> None:
    """Each prompt with the first response of either step side by side, and the mean rewards of all."""
    console = Terminal()
    for place, pair in enumerate(pairs, 1):
        first = pair.before[0]
        console.print(
            _rule(f"{place} | reward {pair.change:+.3g}", {"reward": pair.change, "correct": pair.change >= 0})
        )
        console.print(_field("prompt", first.get("prompt", "")))
        console.print(_field("expected", first.get("expected", "")))
        table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold")
        for step, records in zip(steps, (pair.before, pair.after), strict=True):
            mean = f"mean reward {mean_reward(records):.3g} of {len(records)}"
            table.add_column(f"step {step}: {mean}", ratio=1, overflow="fold")
        table.add_row(*(Text(_headline(records[0]), "dim") for records in (pair.before, pair.after)))
        table.add_row(*(Group(*_conversation(records[0])) for records in (pair.before, pair.after)))
        console.print(table)


def _rule(title: str, record: _Row) -> Rule:
    return Rule(Text(title), align="left", style="red" if is_wrong(record) else "green")


def _headline(record: _Row) -> str:
    """Reward, its parts, and what is known of the response."""
    words = [f"reward {_number(record['reward'])}"]
    words += [f"{printable(str(name))} {_number(value)}" for name, value in (record.get("parts") or {}).items()]
    for name, text in _NUMBERS.items():
        if isinstance(record.get(name), int | float):
            words.append(text.format(record[name]))
    words += [printable(str(record[key])) for key in ("set", "source") if record.get(key)]
    return " | ".join([*words, *(["truncated"] if record.get("truncated") else [])])


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _conversation(record: _Row) -> Iterator[Text]:
    """The response; with tools each turn, call and answer by itself."""
    messages = record.get("messages")
    if not messages:
        yield _field("response", record.get("response", ""))
        return
    turn = 0
    for message in messages:
        content = str(message.get("content", ""))
        if message.get("role") == "tool":
            yield _field("answer", content, "yellow")
            continue
        turn += 1
        # Parts at odd places are the insides of calls.
        for place, part in enumerate(_CALL.split(content)):
            if place % 2:
                yield _field("call", part, "cyan")
            elif part.strip():
                yield _field(f"turn {turn}", part)


def _field(label: str, text: Any, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "bold"), (printable(str(text)), style))
