"""Samples as text for a terminal. Control characters in them are replaced: a response is written by a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhpc.core.terminal import Terminal
from rlhpc.core.text import printable
from rlhpc.observe.sample_choice import is_wrong, mean_reward

if TYPE_CHECKING:
    from rlhpc.observe.sample_choice import Pair

Record = Mapping[str, Any]

_LABEL = 10  # characters
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NUMBERS = {
    "advantage": "advantage {:.3g}",
    "response_length": "{} tokens",
    "policy_version": "version {}",
    "logprob_mean": "log-prob {:.3g}",
    "logprob_diff_mean": "difference {:.2g}",
}


def show_samples(records: Sequence[Record]) -> None:
    """Each sample below a line with its numbers."""
    console = Terminal()
    for number, record in enumerate(records, 1):
        console.print(_rule(f"{number} | {_headline(record)}", record))
        console.print(_field("prompt", record.get("prompt", "")))
        for line in _conversation(record):
            console.print(line)
        console.print(_field("expected", record.get("expected", "")))


def show_pairs(pairs: Sequence[Pair], steps: tuple[int, int]) -> None:
    """Each prompt with the first response of either step side by side, and the mean rewards of all."""
    console = Terminal()
    for number, pair in enumerate(pairs, 1):
        first = pair.before[0]
        console.print(
            _rule(f"{number} | reward {pair.change:+.3g}", {"reward": pair.change, "correct": pair.change >= 0})
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


def _rule(title: str, record: Record) -> Rule:
    return Rule(Text(title), align="left", style="red" if is_wrong(record) else "green")


def _headline(record: Record) -> str:
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


def _conversation(record: Record) -> Iterator[Text]:
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
