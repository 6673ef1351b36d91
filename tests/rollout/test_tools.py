"""Tools between turns: their schemas, how calls are parsed, and how failures are answered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rlhpc.api import Completion, Prompt
from rlhpc.config.data import DataSection
from rlhpc.config.rollout import RolloutSection, ToolSection
from rlhpc.core.errors import UserError
from rlhpc.data.tokenizer import Tokenizer
from rlhpc.rewards.calls import Entry, Failure
from rlhpc.rollout.requests import Task, blank_draft, with_sampled, with_tool_tokens
from rlhpc.rollout.tool_calls import ToolAnswer, ToolCall, load_tool, parse_calls
from rlhpc.rollout.tool_kinds import tool_schemas
from rlhpc.rollout.tools import ToolUse
from tests.helpers.responses import encode_response
from tests.rewards.scoring import exclude_stalls
from tests.rollout.tool_task import ASSISTANT, CALLS, END, TOOL, call, make_tokenizer, tool_sections

SECTION = RolloutSection(
    tools=[ToolSection(**tool) for tool in tool_sections()],
    max_turns=3,
    max_calls_per_turn=5,
    tool_time_limit_seconds=1.0,
    tool_processes=2,
    max_tool_answer_tokens=20,
)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    exclude_stalls(monkeypatch)


class Words(Tokenizer):
    """Turns and answers are one token each, of a vocabulary that grows."""

    def __init__(self) -> None:
        inner = make_tokenizer()
        super().__init__(inner, (inner.eos_token_id,), DataSection())
        self.texts = [""]

    def token(self, text: str) -> tuple[int, ...]:
        self.texts.append(text)
        return (len(self.texts) - 1,)

    def decode(self, tokens: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        return self.texts[tokens[0]]

    def tool_turn(self, answers: Sequence[str], names: Sequence[str] = ()) -> tuple[int, ...]:
        return self.token("\n".join(answers))

    def tool_answers(self, tokens: Sequence[int]) -> list[str]:
        return self.texts[tokens[0]].split("\n")

    def count(self, text: str) -> int:
        return 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = make_tokenizer()
    return Tokenizer(inner, (inner.eos_token_id,), DataSection())


@pytest.fixture(scope="module")
def tools(tokenizer: Tokenizer) -> Iterator[ToolUse]:
    tools = ToolUse(SECTION, tokenizer, leads=True)
    yield tools
    tools.close()


def task(turn: Sequence[int], group: int = 0, after: Task | None = None, reply: Sequence[int] = ()) -> Task:
    """A response whose last turn is ``turn``, after an earlier task and the ``reply`` to it."""
    prompt = Prompt(group, (5,), "sums", "", {"start": 10 * group})
    draft = blank_draft(prompt, 0) if after is None else with_tool_tokens(after.draft, reply)
    sampled = Completion(np.array(turn, np.int32), np.zeros(len(turn), np.float32), False)
    return Task(group, 0, prompt, with_sampled(draft, sampled, 0), (0, 0, 0, 0))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(encode_response(tokenizer, text))


def test_the_policy_sees_its_answer():
    schema = tool_schemas(SECTION.tools)[0]["function"]
    assert schema["name"] == "add"
    assert schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "One of them."},
        "b": {"type": "integer", "description": "The other."},
    }
    assert schema["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": "tests.rollout.tool_functions:untold"}, "no schema can be made of"),
        ({"function": "tests.rollout.tool_functions:nothing"}, "has no 'nothing'"),
        ({"function": "tests.rollout.tool_functions:__name__"}, "is not callable"),
        ({"arguments": {"c": 1}}, "no parameter 'c'"),
        ({"function": "tests.rollout.tool_functions:Silent"}, "without a method __call__"),
        ({"function": "tests.rollout.tool_functions:Counter", "arguments": {"c": 1}}, "cannot be created with c"),
        ({"function": "tests.rollout.tool_functions:Counter.run"}, "has no 'Counter.run'"),
        ({"function": "tests.rollout.tool_functions:Counter.close"}, "no schema can be made of"),
    ],
)
def test_tools_that_cannot_be_are_refused(changes, message):
    section = {"name": "add", "function": "tests.rollout.tool_functions:add", **changes}
    with pytest.raises(UserError, match=message) as error:
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
    ("template", "message"),
    [
        ("{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}", "does not render"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "renders a turn differently"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
            "rejects",
        ),
    ],
)
def test_a_template_without_tools_is_refused(template, message):
    inner = make_tokenizer()
    inner.chat_template = template
    with pytest.raises(UserError, match=message) as error:
        ToolUse(SECTION, Tokenizer(inner, (1,), DataSection()), leads=False)
    assert error.value.where == "data.chat_template"


def test_without_a_template_there_are_no_tools():
    with pytest.raises(UserError, match="chat template"):
        ToolUse(SECTION, Tokenizer(make_tokenizer(), (1,), DataSection(chat_template=False)), leads=False)


def test_an_answer_is_text_that_has_tokens(tokenizer: Tokenizer):
    r"""Also if the policy writes a lone surrogate: "\\ud83d" is JSON."""
    (asked,) = parse_calls(r'<tool_call>{"name": "reach", "arguments": {"host": "\ud83d"}}</tool_call>')
    options = {"arguments": {}, "most_characters": 99}
    failing = load_tool(Entry("tests.rollout.tool_functions:reach", options, ""))
    assert failing(asked.arguments) == Failure("raised", "raised ConnectionError: ? is not there")
    found = load_tool(Entry("builtins:str", options, ""))({"object": asked.arguments["host"]})
    assert found == ToolAnswer("?")
    assert tokenizer.tool_turn([found.text])


@pytest.mark.workers
def test_every_call_is_answered(tools: ToolUse, tokenizer: Tokenizer):
    def answer(*turns: str) -> list[str]:
        for key, turn in enumerate(turns):
            assert tools.begin(key, task(encode(tokenizer, turn), group=key))
        found = tools.answers(all_of_them=True)
        frame = len(f"{END}{TOOL}"), -len(ASSISTANT)
        counts.extend((found[key].calls, found[key].failures) for key in range(len(turns)))
        return [tokenizer.decode(found[key].tokens, special=True)[slice(*frame)] for key in range(len(turns))]

    good, _, failing, long, broken = CALLS
    counts: list[tuple[int, int]] = []
    assert answer(good) == ["420"]
    assert answer(good + good) == [f"420{TOOL}420"]
    texts = answer(failing, long, broken, good)
    assert all("error:" in text for text in texts[:3])
    assert texts[3] == "420"
    assert counts == [(1, 0), (2, 0), (1, 1), (1, 1), (1, 1), (1, 0)]
    *run, last = answer(good * (SECTION.max_calls_per_turn + 1))[0].split(TOOL)
    assert run == ["420"] * SECTION.max_calls_per_turn
    assert last.startswith("error:")
    assert counts[-1] == (SECTION.max_calls_per_turn + 1, 1)


@pytest.mark.workers
def test_what_went_wrong_is_reported():
    """By the words, which the small vocabulary does not have."""
    words = Words()
    tools = ToolUse(SECTION, words, leads=True)

    def ask(*calls: str) -> list[str]:
        for key, text in enumerate(calls):
            assert tools.begin(key, task(words.token(text), group=key))
        return [words.texts[reply.tokens[0]] for _, reply in sorted(tools.answers(all_of_them=True).items())]

    began = time.monotonic()
    names = ("missing", "reach", "wait", "die", "places", "add")
    calls = (
        call("subtract", a=1),
        call("reach", host="x"),
        call("wait", seconds=1000),
        call("die"),
        call("add", a=1, b=2, places=5),
        call("add", a=1, b=2),
    )
    answers = dict(zip(names, ask(*calls), strict=True))
    assert time.monotonic() - began < 300
    assert answers["missing"] == "error: there is no tool 'subtract', only add, reach, wait, talk, die, count"
    assert answers["reach"] == "error: raised ConnectionError: x is not there"
    assert answers["wait"] == "error: took more than 1 s"
    assert answers["die"] == "error: ended its process with exit code 3"
    assert "multiple values" in answers["places"]
    assert answers["add"] == "30"
    assert ask(call("wait", seconds=0.0)) == ['{"waited": 0.0}']
    tools.close()


@pytest.mark.workers
def test_the_last_turn_s_calls_are_not_run(tools: ToolUse, tokenizer: Tokenizer):
    turn, reply = encode(tokenizer, CALLS[0]), tokenizer.tool_turn(["420"])
    third = task(turn, after=task(turn, after=task(turn), reply=reply), reply=reply)
    final = task(encode(tokenizer, "42"), after=task(turn, after=task(turn), reply=reply), reply=reply)
    assert not tools.begin(0, third)
    assert not tools.begin(0, final)
    assert not tools.begin(0, task(encode(tokenizer, "42")))
    assert tools.answers(all_of_them=True) == {}
    assert tools.unanswered(third), "it is cut off before its calls"
    assert not tools.unanswered(final), "it ends by itself in the last turn"
    assert not tools.unanswered(task(encode(tokenizer, "42")))


# ---- tools with state


class Talk:
    """Conversations with tools."""

    def __init__(self, section: RolloutSection) -> None:
        self.words = Words()
        self.tools = ToolUse(section, self.words, leads=True)
        self.tasks: dict[int, Task] = {}
        self.replies: dict[int, tuple[int, ...]] = {}

    def ask(self, *asked: tuple[int, str]) -> list[str]:
        """What is answered to a turn of each of some conversations, made at once."""
        for group, calls in asked:
            turn = self.words.token(calls)
            self.tasks[group] = task(turn, group, self.tasks.get(group), self.replies.get(group, ()))
            assert self.tools.begin(group, self.tasks[group])
        answers = {key: reply.tokens for key, reply in self.tools.answers(all_of_them=True).items()}
        self.replies |= answers
        return [self.words.texts[answers[group][0]] for group, _ in asked]


@pytest.mark.workers
def test_tools_with_state(tmp_path: Path):
    """One process for all; it is lost with a call that hangs, and other conversations go on where they were."""
    file, module = tmp_path / "log", "tests.rollout.tool_functions:Counter"
    counter = {"arguments": {"file": str(file)}}
    sections = [
        ToolSection(name="count", function=module, **counter),
        ToolSection(name="leap", function=f"{module}.leap", **counter),
    ]
    parameters = tool_schemas(sections)[1]["function"]["parameters"]
    assert list(parameters["properties"]) == ["steps", "seconds"]
    assert parameters["required"] == ["steps"]
    limits = {"max_turns": 10, "tool_processes": 1, "tool_time_limit_seconds": 1.0}
    talk = Talk(RolloutSection(tools=sections, **limits))
    tools = talk.tools
    count, back, long = call("count"), call("leap", steps=-1), call("leap", steps=1, seconds=1000)

    assert talk.ask((0, count), (1, count)) == ["1", "11"]
    assert talk.ask((1, count + call("leap", steps=5) + count)) == ["12\n17\n18"], "in their order, on one object"
    assert talk.ask((0, back)) == ["error: raised ValueError: backwards"]
    assert talk.ask((0, count), (1, count)) == ["1", "19"]
    assert file.read_text().split() == ["made"] * 2
    assert talk.ask((0, long), (1, count)) == ["error: took more than 1 s", "20"]
    # What was answered with an error is not made again: the step back is none any more.
    assert talk.ask((0, count), (1, count)) == ["3", "21"]
    assert file.read_text().split() == ["made"] * 4

    tools.end(talk.tasks[1])  # aborted, and resumed
    assert talk.ask((1, count)) == ["22"]
    for task_of_one in talk.tasks.values():
        tools.end(task_of_one)
    tools.close()
    lines = file.read_text().splitlines()
    assert sorted(lines) == ["closed at 21", "closed at 22", "closed at 3", *["made"] * 5]


@pytest.mark.workers
def test_a_tool_with_state_stays_in_its_process(tmp_path: Path):
    """Conversations on two processes: each object is made once, and closed with all that it was asked."""
    file, module = tmp_path / "log", "tests.rollout.tool_functions:Counter"
    section = ToolSection(name="leap", function=f"{module}.leap", arguments={"file": str(file)})
    talk, groups = Talk(RolloutSection(tools=[section], max_turns=10, tool_processes=2)), range(4)
    tools = talk.tools
    for turn, seconds in enumerate((0.6, 0.05, 0.05, 0.05), 1):  # until the second process is there too
        asked = call("leap", steps=1, seconds=seconds)
        assert talk.ask(*((group, asked) for group in groups)) == [str(10 * group + turn) for group in groups]
    assert len(tools._pool._workers) == 2
    for last in talk.tasks.values():
        tools.end(last)
    tools.close()
    assert sorted(file.read_text().splitlines()) == [*(f"closed at {n}" for n in (14, 24, 34, 4)), *["made"] * 4]
    assert not tools._pool._homes
