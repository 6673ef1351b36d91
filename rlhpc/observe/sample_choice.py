"""Chooses among samples: conditions on their columns, order, pairs of two steps. Pure, free of torch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.core.errors import UserError, did_you_mean

Record = Mapping[str, Any]

_CONDITION = re.compile(r"\s*(?P<column>[^\s<>=!~]+)\s*(?P<sign><=|>=|==|!=|!~|<|>|=|~)\s*(?P<value>.*?)\s*", re.DOTALL)
_AND = re.compile(r"\s+and\s+")
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_TEXT: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "~": lambda text, part: part.casefold() in text.casefold(),
    "!~": lambda text, part: part.casefold() not in text.casefold(),
}
_SHORT = {"length": "response_length", "version": "policy_version", "logprob": "logprob_mean"}
_NOT_COLUMNS = ("parts", "messages")


@dataclass(frozen=True)
class Condition:
    """``column sign value``, such as reward < 0.5 or response ~ "because"."""

    column: str
    sign: str
    value: str

    def holds(self, record: Record) -> bool:
        """True if a sample fulfils it; one without a value does so for != and !~ alone."""
        found = value_of(record, self.column)
        if found is None:
            return self.sign.startswith("!")
        if isinstance(found, bool):
            return _ORDER[self.sign](found, self.value.lower() == "true")
        if isinstance(found, int | float):
            return _ORDER[self.sign](found, float(self.value))
        return _TEXT[self.sign](str(found), self.value)


def read_conditions(texts: Sequence[str], records: Sequence[Record]) -> list[Condition]:
    """Conditions of an option, checked against the samples: several in one text are joined by ``and``."""
    return [_condition(part, records) for text in texts for part in _AND.split(text)]


def _condition(text: str, records: Sequence[Record]) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        example = "write a column, one of < <= > >= = != ~ !~, and a value, such as 'reward < 0.5'"
        raise UserError(f"{text!r} is not a condition", where="--where", remedy=example)
    sign = "=" if match["sign"] == "==" else match["sign"]
    value = match["value"]
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    column = known_column(match["column"], records, "--where")
    kinds = {type(found) for record in records if (found := value_of(record, column)) is not None}
    if kinds and kinds <= {bool} and (value.lower() not in ("true", "false") or sign not in ("=", "!=")):
        raise UserError(f"{column} is true or false", where="--where", remedy=f"write {column} = true")
    if kinds and kinds <= {int, float} and not (_is_number(value) and sign in _ORDER):
        raise UserError(f"{column} is a number", where="--where", remedy=f"compare it with one, as {column} < 0.5")
    if kinds - {bool, int, float} and sign not in _TEXT:
        raise UserError(f"{column} is a text", where="--where", remedy="compare it with = != ~ (contains) or !~")
    return Condition(column, sign, value)


def known_column(name: str, records: Sequence[Record], where: str) -> str:
    """The column's full name. Raises UserError if no sample has it."""
    there = columns(records)
    if name not in there and _SHORT.get(name) in there:
        return _SHORT[name]
    if records and name not in there:
        raise UserError(f"no column {name!r}", where=where, remedy=did_you_mean(name, there))
    return name


def columns(records: Sequence[Record]) -> list[str]:
    """Names that conditions and orders take; parts of the reward as reward/NAME."""
    plain = {name for record in records for name in record if name not in _NOT_COLUMNS}
    parts = {f"reward/{name}" for record in records for name in record.get("parts") or {}}
    return sorted(plain | parts)


def value_of(record: Record, column: str) -> Any:
    """The sample's value in a column; None if it has none."""
    if column.startswith("reward/"):
        return (record.get("parts") or {}).get(column.removeprefix("reward/"))
    return record.get(column)


def in_order(records: Sequence[Record], column: str) -> list[Record]:
    """Samples by a column, from the least; with ``-`` before it from the greatest. Those without a value come last."""
    name = known_column(column.removeprefix("-"), records, "--sort")
    known = [record for record in records if not _is_missing(value_of(record, name))]
    texts = any(isinstance(value_of(record, name), str) for record in known)
    ordered = sorted(
        known,
        key=lambda record: str(value_of(record, name)) if texts else value_of(record, name),
        reverse=column.startswith("-"),
    )
    return ordered + [record for record in records if _is_missing(value_of(record, name))]


def contains(record: Record, text: str) -> bool:
    """True if prompt, response, answer or ground truth contains the text, in upper or lower case."""
    texts = (record.get(name) for name in ("prompt", "response", "answer", "expected"))
    return any(text.casefold() in str(found).casefold() for found in texts if found is not None)


def is_wrong(record: Record) -> bool:
    """True if the response is incorrect."""
    correct = record.get("correct")
    return not (record["reward"] > 0 if correct is None else correct)


@dataclass(frozen=True)
class Pair:
    """The samples of one prompt in two steps."""

    before: tuple[Record, ...]
    after: tuple[Record, ...]

    @property
    def change(self) -> float:
        """Change of the mean reward."""
        return mean_reward(self.after) - mean_reward(self.before)


def mean_reward(records: Sequence[Record]) -> float:
    """Mean reward of at least one sample."""
    return sum(record["reward"] for record in records) / len(records)


def pairs(before: Sequence[Record], after: Sequence[Record]) -> list[Pair]:
    """Prompts that both steps have, the one that lost most first."""
    first, second = _by_prompt(before), _by_prompt(after)
    found = [Pair(tuple(first[key]), tuple(second[key])) for key in first if key in second]
    return sorted(found, key=lambda pair: math.inf if math.isnan(pair.change) else pair.change)


def _by_prompt(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault((record.get("set"), record.get("prompt_id"), record.get("prompt")), []).append(record)
    return found


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
