"""Parsing a response takes time linear in its length, for any contents."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlhpc.rewards.code import last_block
from rlhpc.rewards.formats import think_answer
from rlhpc.rewards.rules import boxed, exact, maths, number
from rlhpc.rollout.tool_calls import parse_calls

SIZE = 240_000
ENOUGH = 4.0  # seconds of processor time; the slowest takes a tenth of it, and half a minute or more were it quadratic

READERS: dict[str, Callable[[str], object]] = {
    "last_block": last_block,
    "parse_calls": parse_calls,
    "think_answer": lambda text: think_answer("", text, None, {}),
    "boxed": lambda text: boxed("", text, "1", {}),
    "exact": lambda text: exact("", text, "1", {}),
    "number": lambda text: number("", text, "1", {}),
    "answers": lambda text: [rule.answer(text) for rule in (boxed, exact, number)],
}
# Of each, so many repetitions that there are SIZE characters, between the others.
TEXTS = {
    "spaces after a fence": ("```", " ", "`"),
    "spaces before a fence": ("", " ", "``"),
    "a long word after a fence": ("```", "a", "`"),
    "backticks": ("", "`", ""),
    "fences": ("", "```\n", ""),
    "fences with words": ("", "```python\n", ""),
    "calls that begin": ("", "<tool_call>", ""),
    "calls that end": ("", "</tool_call>", ""),
    "calls with nothing": ("", "<tool_call></tool_call>", ""),
    "a call of brackets": ("<tool_call>", "[", "</tool_call>"),
    "a call with a long number": ('<tool_call>{"name": "a", "arguments": {"x": ', "9", "}}</tool_call>"),
    "spaces around thoughts": ("<think></think>", " ", "<answer></answer>x"),
    "spaces after an answer": ("<think></think><answer></answer>", " ", "x"),
    "thoughts": ("", "<think></think>", "<answer></answer>"),
    "thoughts that begin": ("", "<think>", ""),
    "lesser signs": ("", "<", ""),
    "boxes": ("", r"\boxed{1}", ""),
    "boxes that begin": ("", r"\boxed{", ""),
    "braces": (r"\boxed{", "{", "}"),
    "spaces in a box": (r"\boxed{", " ", "}"),
    "digits": ("", "9", ""),
    "minus signs": ("", "-", ""),
    "numbers": ("", "1 ", ""),
    "lines": ("", "\n", "x"),
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_a_response_takes_linear_time(reader: str):
    slow = {}
    for name, (before, unit, after) in TEXTS.items():
        text = before + unit * (SIZE // len(unit)) + after
        began = time.process_time()
        READERS[reader](text)
        taken = time.process_time() - began
        if taken > ENOUGH:
            slow[name] = taken
    assert slow == {}


def test_maths_takes_no_longer_for_a_longer_response():
    """math-verify's own expressions are not linear, but see no more than the end of a response."""
    maths("", "1", "1", {})
    for unit in ("1 ", r"\["):
        began = time.process_time()
        maths("", unit * (SIZE // len(unit)), "42", {})
        assert time.process_time() - began < 10.0, unit
