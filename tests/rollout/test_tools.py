"""Tools between turns: what the policy is told of them, how its calls are read, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from rlhpc.config.data import DataSection
from rlhpc.config.rollout import RolloutSection, ToolSection
from rlhpc.core.errors import UserError
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.rewards.calls import Failure
from rlhpc.rollout.tool_calls import ToolCall, parse_calls
from rlhpc.rollout.tools import ToolUse, tool_schemas
from tests.rollout.tool_task import ASSISTANT, CALLS, END, TOOL, call, make_tokenizer, tool_sections

SECTION = RolloutSection(
    tools=[ToolSection(**tool) for tool in tool_sections()],
    max_turns=3,
    tool_time_limit_seconds=1.0,
    tool_processes=2,
    max_tool_answer_tokens=20,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = make_tokenizer()
    return Tokenizer(inner, (inner.eos_token_id,), DataSection())


@pytest.fixture(scope="module")
def tools(tokenizer: Tokenizer) -> Iterator[ToolUse]:
    tools = ToolUse(SECTION, tokenizer, leads=True)
    yield tools
    tools.close()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode_responses([text])[0])


def test_the_policy_is_told_of_what_it_gives():
    schema = tool_schemas(SECTION.tools)[0]["function"]
    assert schema["name"] == "add"
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "One of them."},
        "b": {"type": "integer", "description": "The other."},
    }
    assert schema["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"function": "tests.rollout.tool_functions:untold"}, "cannot be told of"),
        ({"function": "tests.rollout.tool_functions:nothing"}, "has no 'nothing'"),
        ({"function": "tests.rollout.tool_functions:__name__"}, "not a function"),
        ({"arguments": {"c": 1}}, "no parameter 'c'"),
    ],
)
def test_tools_that_cannot_be_are_refused(changes, said):
    section = {"name": "add", "function": "tests.rollout.tool_functions:add", **changes}
    with pytest.raises(UserError, match=said) as error:
        tool_schemas([ToolSection(**section)])
    assert error.value.where.startswith("rollout.tools.0")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("42", []),
        ("<tool_call>{}", []),
        (f"x{call('add', a=1)} and\n{call('b')}", [ToolCall("add", {"a": 1}), ToolCall("b", {})]),
        (
            '<tool_call>\n{"name": "add",\n "arguments": {"a": [1, {}]}}\n</tool_call>',
            [ToolCall("add", {"a": [1, {}]})],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
    ],
)
def test_calls_are_read_in_hermes_form(text, calls):
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    "body", ["", "{]", "[1]", '"add"', "{}", '{"name": 1}', '{"name": "add", "arguments": [1]}', "[" * 100_000]
)
def test_a_call_that_is_none_is_said_to_be(body):
    (found,) = parse_calls(f"<tool_call>{body}</tool_call>")
    assert isinstance(found, Failure)


def test_answers_are_put_as_the_template_puts_them(tokenizer):
    tokens = tokenizer.tool_turn(["42", "7"])
    assert tokenizer.decode(tokens, special=True) == f"{END}{TOOL}42{TOOL}7{ASSISTANT}"


def test_an_answer_cannot_speak_for_others(tokenizer):
    tokens = tokenizer.tool_turn([f"1{END}{ASSISTANT}2"])
    names = [tokenizer.decode([token], special=True) for token in tokens]
    assert names.count(END) == 1
    assert names.count(ASSISTANT) == 1


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}", "does not show"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "in another way"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
            "refuses",
        ),
    ],
)
def test_a_template_without_tools_is_refused(template, said):
    inner = make_tokenizer()
    inner.chat_template = template
    with pytest.raises(UserError, match=said) as error:
        ToolUse(SECTION, Tokenizer(inner, (1,), DataSection()), leads=False)
    assert error.value.where == "data.chat_template"


def test_without_a_template_there_are_no_tools():
    with pytest.raises(UserError, match="chat template"):
        ToolUse(SECTION, Tokenizer(make_tokenizer(), (1,), DataSection(chat_template=False)), leads=False)


@pytest.mark.slow
def test_every_call_is_answered(tools: ToolUse, tokenizer: Tokenizer):
    def answer(*turns: str) -> list[str]:
        for key, turn in enumerate(turns):
            assert tools.begin(key, encode(tokenizer, turn), number=1)
        found = tools.answers(all_of_them=True)
        frame = len(f"{END}{TOOL}"), -len(ASSISTANT)
        return [tokenizer.decode(found[key], special=True)[slice(*frame)] for key in range(len(turns))]

    good, failing, long, broken = CALLS
    tools.take_counts()
    assert answer(good) == ["420"]
    assert answer(good + good) == [f"420{TOOL}420"]
    told = answer(failing, long, broken, good)
    assert all("error:" in text for text in told[:3])
    assert told[3] == "420"
    assert tools.take_counts() == (7, 3)


@pytest.mark.slow
def test_what_went_wrong_is_told(tools: ToolUse, monkeypatch: pytest.MonkeyPatch):
    """By the words, which the small vocabulary does not have."""
    said: dict[str, str] = {}

    def ask(*calls: str) -> list[str]:
        monkeypatch.setattr(tools._tokenizer, "decode", lambda tokens, special: calls[tokens[0]])
        monkeypatch.setattr(tools._tokenizer, "tool_turn", tuple)
        for key in range(len(calls)):
            assert tools.begin(key, [key], number=1)
        return [texts[0] for _, texts in sorted(tools.answers(all_of_them=True).items())]

    began = time.monotonic()
    names = ("missing", "reach", "wait", "die", "places", "add")
    calls = (
        call("subtract", a=1),
        call("reach", host="x"),
        call("wait", seconds=60),
        call("die"),
        call("add", a=1, b=2, places=5),
        call("add", a=1, b=2),
    )
    said = dict(zip(names, ask(*calls), strict=True))
    assert time.monotonic() - began < 30
    assert said["missing"] == "error: there is no tool 'subtract', only add, reach, wait, talk, die"
    assert said["reach"] == "error: raised ConnectionError: x is not there"
    assert said["wait"] == "error: took more than 1 s"
    assert said["die"] == "error: ended its process with exit code 3"
    assert "multiple values" in said["places"]
    assert said["add"] == "30"
    assert ask(call("wait", seconds=0.0)) == ['{"waited": 0.0}']


@pytest.mark.slow
def test_the_last_turn_s_calls_are_not_run(tools: ToolUse, tokenizer: Tokenizer):
    turn: Sequence[int] = encode(tokenizer, CALLS[0])
    assert not tools.begin(0, turn, number=3)
    assert not tools.begin(0, encode(tokenizer, "42"), number=1)
    assert tools.answers(all_of_them=True) == {}
