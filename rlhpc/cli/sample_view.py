"""Samples of validations and of training steps: where ``rlhpc samples`` finds them, and their text for a terminal.

Control characters are replaced: a response is written by a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.rule import Rule
from rich.text import Text

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number
from rlhpc.core.terminal import Terminal
from rlhpc.core.text import printable
from rlhpc.launch.runs.run_registry import find_run
from rlhpc.observe.training_samples import file_of, kept_steps, read_file

Record = dict[str, Any]
_REMEDIES = {
    "validation": "wait for the first validation, which needs data.validation, or add --training",
    "training": "wait for the first step; observe.training_samples must be on",
}
_FILES = "give a run, or a file of its folder training_samples"
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


@dataclass(frozen=True)
class Source:
    """Samples in the file ``path``; with ``folder``, those of its training steps, whose files are in ``path``."""

    kind: Literal["validation", "training"]
    path: Path
    folder: RunFolder | None = None

    def file(self, step: int) -> Path:
        """File with the samples of a step."""
        return self.path if self.folder is None else file_of(self.folder, step)

    def step(self, asked: int | None) -> int:
        """The step asked for, or the last one. Raises UserError if it has no samples."""
        there = sorted({row["step"] for row in self._rows(0)}) if self.folder is None else kept_steps(self.folder)
        step = (there[-1] if there else 0) if asked is None else asked
        if step in there:
            return step
        if not there and self.folder is not None:
            raise _none_yet(self.kind, str(self.folder.path))
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"no samples of step {step}", where=str(self.path), remedy=f"steps with samples: {names}")

    def read(self, step: int) -> list[Record]:
        """Samples of a step, in the order that they were written in."""
        return [row for row in self._rows(step) if row["step"] == step]

    def _rows(self, step: int) -> Iterable[Record]:
        return _read_lines(self.path) if self.kind == "validation" else _read_rows(self.file(step))


def find_source(text: str, *, training: bool) -> Source:
    """Samples of a file, or of a run. Raises UserError if there are none."""
    path = Path(text)
    if path.is_file():
        return Source("training" if path.suffix == ".parquet" else "validation", path)
    folder = find_run(text).folder
    if training and folder.training_samples.is_dir():
        return Source("training", folder.training_samples, folder)
    if training or not folder.samples.is_file():
        raise _none_yet("training" if training else "validation", text)
    return Source("validation", folder.samples)


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


def show_samples(records: Sequence[_Row]) -> None:
    """Each sample below a line with its numbers."""
    console = Terminal()
    for place, record in enumerate(records, 1):
        console.print(_rule(f"{place} | {_headline(record)}", record))
        console.print(_field("prompt", record.get("prompt", "")))
        for line in _conversation(record):
            console.print(line)
        console.print(_field("expected", record.get("expected", "")))


def is_wrong(record: _Row) -> bool:
    """True if the response is incorrect."""
    correct = record.get("correct")
    return not (record["reward"] > 0 if correct is None else correct)


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
