"""Conditions of rules: `> 0.5`, `< 0.7 of best`, `non-finite`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rlhpc.core.errors import UserError

Reference = Literal["", "best", "first", "median"]
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM = re.compile(
    r"\s*(?P<compare>[<>]=?)\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?:\s+of\s+(?P<of>\w+))?\s*"
)
_REMEDY = 'write "> 0.5", "< 0.7 of best", of first or of median, or "non-finite"'


@dataclass(frozen=True)
class MetricCondition:
    """Comparison of a value with ``number``, or with that share of a reference; or whether it is not finite, with an
    empty ``compare``."""

    compare: str = ""
    number: float = 0.0
    of: Reference = ""

    def __str__(self) -> str:
        share = f" of {self.of}" if self.of else ""
        return f"{self.compare} {self.number:g}{share}" if self.compare else "non-finite"

    def limit(self, reference: float) -> float:
        """The value that is compared with. A share of a negative reference is as far from it as that of its amount:
        0.7 of -1 is -1.3, so that "< 0.7 of best" means 30% worse for rewards of any sign."""
        if not self.of:
            return self.number
        return reference + (self.number - 1) * abs(reference)

    def holds(self, value: float, reference: float = 0.0) -> bool:
        """Whether the value fulfils the condition."""
        if not self.compare:
            return not math.isfinite(value)
        return _COMPARE[self.compare](value, self.limit(reference))

    @property
    def upwards(self) -> bool:
        """Whether large values fulfil it."""
        return self.compare.startswith(">")


def parse_condition(text: str, where: str = "condition") -> MetricCondition:
    """MetricCondition of a rule in the configuration. Raises UserError if it is none."""
    if text.strip().replace("_", "-") == "non-finite":
        return MetricCondition()
    match = _FORM.fullmatch(text)
    if match is None:
        raise UserError(f"{text[:80]!r} is not a condition", where=where, remedy=_REMEDY)
    of, number = match["of"] or "", float(match["number"])
    if of not in get_args(Reference):
        raise UserError(f"{of[:80]!r} is not a reference of conditions", where=where, remedy=_REMEDY)
    if not math.isfinite(number):
        raise UserError(f"{match['number']!r} is too large", where=where, remedy=_REMEDY)
    return MetricCondition(match["compare"], number, of)  # type: ignore[arg-type]
