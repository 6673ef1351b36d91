"""Rewards of form and length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import Entry, load_function
from rlhpc.rewards.formats import length, overlong, pattern, think_answer
from tests.docs.pages import DOCS, blocks
from tests.helpers.runs import ROOT

OVERLONG = "rlhpc.rewards.formats:overlong"


def shipped() -> dict[str, Any]:
    """The rewards of each configuration that we ship or print and that has the overlong penalty."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / "configs").rglob("*.yaml"))}
    texts |= {f"rewards.md {place}": text for place, text in enumerate(blocks(DOCS / "rewards.md", "yaml"))}
    return {name: yaml.safe_load(text)["rewards"] for name, text in texts.items() if OVERLONG in text}


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("so: <think>a</think><answer>3</answer>", 0),
        ("<think>a</think><answer>3</answer> and more", 0),
        ("<answer>3</answer><think>a</think>", 0),
        ("<think>a</think><think>b</think><answer>3</answer>", 0),
        ("<think>a<answer>2</answer></think><answer>3</answer>", 0),
        ("<think>a</think><answer>3", 0),
        ("", 0),
    ],
)
def test_thoughts_then_answer_each_once(response: str, value: float):
    assert think_answer("", response, None, {}) == value


def test_a_pattern_is_of_the_whole_response():
    assert pattern("", "a\nb", None, {}, regex="a.b", score=0.2) == 0.2
    assert pattern("", "a\nb ", None, {}, regex="a.b") == 0
    assert pattern("", "a\nb", None, {}, regex="a.b") == 1


@pytest.mark.parametrize(("tokens", "value"), [(1, 0), (80, 0), (81, -0.025), (90, -0.25), (100, -0.5), (101, -0.5)])
def test_overlong_goes_down_linearly_within_the_buffer(tokens: int, value: float):
    """DAPO's equation 13, (L_max - L_cache - |y|) / L_cache, times the penalty."""
    found = overlong(response_tokens=tokens, max_response_tokens=100, buffer_tokens=20, penalty=0.5)
    assert found == pytest.approx(value)


def test_overlong_is_dapos_by_itself():
    found = [overlong(response_tokens=n, max_response_tokens=20480) for n in (16384, 18432, 20480)]
    assert found == [0, -0.5, -1]


@pytest.mark.parametrize("name", shipped())
def test_shipped_penalties_weigh_against_our_rewards_as_dapos_weighs_against_its_own(name: str):
    """DAPO's reward (arXiv 2503.14476, section 3.5) is 1 or -1, and its penalty 1: a right answer of full length is
    worth 0, half the way down to a wrong one. Ours is 1 or 0: all values are theirs, mapped by (reward + 1) / 2."""
    (penalty,) = (entry for entry in shipped()[name] if entry.get("function") == OVERLONG)
    (right,) = (entry for entry in shipped()[name] if ".rules:" in entry.get("function", ""))
    assert (right.get("weight", 1.0), penalty.get("weight", 1.0)) == (1.0, 1.0)
    arguments: Mapping[str, Any] = penalty["arguments"]
    buffer = arguments["buffer_tokens"]

    def ours(correct: float, tokens: int) -> float:
        return correct + overlong(response_tokens=tokens, max_response_tokens=4 * buffer, **arguments)

    lengths = {2 * buffer: 0.0, 3 * buffer: 0.0, 4 * buffer: -1.0} | ({7 * buffer // 2: -0.5} if buffer > 1 else {})
    for tokens, theirs in lengths.items():
        assert ours(1.0, tokens) == pytest.approx((1 + theirs + 1) / 2)
        assert ours(0.0, tokens) == pytest.approx((-1 + theirs + 1) / 2)
    assert (ours(1.0, 4 * buffer) - ours(0.0, 0)) / (ours(1.0, 0) - ours(0.0, 0)) == pytest.approx(0.5)


def test_a_buffer_longer_than_a_response_is_refused():
    with pytest.raises(ValueError, match="buffer_tokens 200 is not between 1 and the 100"):
        overlong(response_tokens=1, max_response_tokens=100, buffer_tokens=200)
    for most, arguments in ((1, {"buffer_tokens": 1}), (4096, {})):
        load_function(
            Entry("rlhpc.rewards.formats:overlong", arguments, "rewards.0.function", max_response_tokens=most)
        )
    for most, arguments in ((100, {"buffer_tokens": 200}), (9, {"buffer_tokens": 0}), (1024, {})):  # before the run
        entry = Entry("rlhpc.rewards.formats:overlong", arguments, "rewards.long", max_response_tokens=most)
        with pytest.raises(UserError, match=rf"^rewards.long: .*is not between 1 and the {most} of"):
            load_function(entry)


def test_length_is_relative_to_the_longest():
    assert length("", "", None, {}, response_tokens=25, max_response_tokens=100) == -0.25
