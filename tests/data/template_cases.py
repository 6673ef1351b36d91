"""Random conversations, and the properties that their renderings have with any template."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.data.chat_template import Chat
from rlhpc.data.tokenizer import Tokenizer

ODD = [
    "",
    "  ",
    "\n\n",
    "ß漢字🙂",
    "e\u0301",
    "{{ x }}",
    "{% if %}",
    '"quoted" \\ back',
    "<b>",
    "1",
    "</s",
    "\u200b",
    "'s",
]
UNKNOWN = ("human", "User", "gpt", "bot")
WORD = re.compile(r"w[abm]\d+z")


@dataclass
class Texts:
    """Makes texts with words of their own. ``controls``: names that a text may contain."""

    rng: random.Random
    controls: list[str]
    made: int = 0
    words: list[str] = field(default_factory=list)

    def text(self, *, empty: bool = True) -> str:
        if empty and self.rng.random() < 0.04:
            return ""
        self.made += 1
        first, last = f"wa{self.made}z", f"wb{self.made}z"
        inner = [self.rng.choice(ODD) for _ in range(self.rng.randint(0, 3))]
        if self.controls and self.rng.random() < 0.3:
            inner.append(self.rng.choice(self.controls))
        self.rng.shuffle(inner)
        around = [self.rng.choice(("", "", " ", "\n")) for _ in range(2)]
        return f"{around[0]}{first}{' '.join(inner)}{last}{around[1]}"


@dataclass(frozen=True)
class Case:
    """A conversation that ends with the assistant. ``plain``: users and assistants in turn, whom all templates know."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    plain: bool


def controls_of(tokenizer: Tokenizer) -> list[str]:
    """Names of control tokens, some of many."""
    assert tokenizer.template is not None
    names = re.split(r"(?<!\\)\|", tokenizer.template.control.pattern)
    return [re.sub(r"\\(.)", r"\1", name) for name in names[:: max(1, len(names) // 40)]]


def make_case(seed: int, controls: list[str]) -> Case:
    rng = random.Random(seed)
    texts = Texts(rng, controls)
    plain = rng.random() < 0.3
    messages: list[dict[str, Any]] = []
    if not plain and rng.random() < 0.4:
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": texts.text(empty=False)})
    tools = None
    if not plain and rng.random() < 0.3:
        description = {
            "name": "f_wm0z",
            "description": texts.text(),
            "parameters": {"type": "object", "properties": {}},
        }
        tools = [{"type": "function", "function": description}]
    for _ in range(rng.randint(1, 4)):
        role = rng.choice(UNKNOWN) if not plain and rng.random() < 0.05 else "user"
        messages.append({"role": role, "content": texts.text(empty=not plain)})
        if not plain and rng.random() < 0.3:
            messages += _call(rng, texts)
        messages.append(_answer(rng, texts, plain=plain))
    return Case(messages, tools, plain)


def _call(rng: random.Random, texts: Texts) -> list[dict[str, Any]]:
    values = [texts.text(), rng.choice((0, 1.5, True, None)), [texts.text()], {"inner": texts.text(empty=False)}]
    arguments = {f"key{i}": value for i, value in enumerate(rng.sample(values, rng.randint(0, 3)))}
    function = {"name": f"f_wm{texts.made}z", "arguments": arguments}
    call = {"type": "function", "id": "call00001", "function": function}
    turn = {"role": "assistant", "content": rng.choice(("", None, texts.text())), "tool_calls": [call]}
    if turn["content"] is None:
        del turn["content"]
        turn["content"] = ""
    return [turn, {"role": "tool", "content": texts.text(), "tool_call_id": "call00001", "name": function["name"]}]


def _answer(rng: random.Random, texts: Texts, *, plain: bool) -> dict[str, Any]:
    content = texts.text(empty=not plain)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if not plain and rng.random() < 0.2:
        message["content"] = f"<think>\n{texts.text()}\n</think>\n\n{content}"
    elif not plain and rng.random() < 0.1:
        message["reasoning_content"] = texts.text()
    return message


def words_of(value: Any) -> list[str]:
    """The words in all texts of a value, in order."""
    if isinstance(value, str):
        return WORD.findall(value)
    if isinstance(value, dict):
        return [word for item in value.values() for word in words_of(item)]
    return [word for item in value for word in words_of(item)] if isinstance(value, list | tuple) else []


def reasoning_of(message: dict[str, Any]) -> list[str]:
    if message["role"] != "assistant":
        return []
    before = message["content"].rpartition("</think>")[0]
    return words_of([message.get("reasoning_content", ""), before])


def violations(tokenizer: Tokenizer, case: Case) -> Iterator[str]:
    """Properties that a template's renderings of a conversation lack."""
    prompt = case.messages[:-1]
    begun = yield from _prompt(tokenizer, case, prompt)
    yield from _supervised(tokenizer, case, begun, every=False)
    yield from _supervised(tokenizer, case, None, every=True)


def _prompt(tokenizer: Tokenizer, case: Case, prompt: list[dict[str, Any]]) -> Iterator[str]:
    try:
        (tokens,) = tokenizer.encode_prompts([Chat(prompt, case.tools)])
    except UserError as error:
        if case.plain:
            yield f"a plain prompt is refused: {error}"
        return None
    text = tokenizer.decode(tokens, special=True)
    yield from _lost("prompt", prompt, text, trained=())
    yield from _controls(tokenizer, tokens, Chat(prompt, case.tools))
    return text


def _lost(what: str, messages: list[dict[str, Any]], text: str, trained: tuple[int, ...]) -> Iterator[str]:
    for index, message in enumerate(messages):
        needed = words_of({name: field for name, field in message.items() if name != "name"})
        if index not in trained:
            needed = [word for word in needed if word not in reasoning_of(message)]
        if missing := [word for word in needed if word not in text]:
            yield f"{what}: {missing} of {message['role']} are lost"


def _controls(tokenizer: Tokenizer, tokens: Any, chat: Chat) -> Iterator[str]:
    """The control tokens of a rendering must be those of the same conversation without their names in its texts."""
    assert tokenizer.template is not None
    clean = _without(chat.messages), _without(chat.tools)
    template = tokenizer.template
    named = list(template.control.findall(template.prompt(Chat(*clean))))
    decoded = [tokenizer.decode([token], special=True) for token in tokens]
    found = [name for name in decoded if template.control.fullmatch(name)]
    if found != named:
        yield f"prompt: control tokens {found} instead of {named}"


def _without(value: Any) -> Any:
    """Texts of words and plain markup alone."""
    if isinstance(value, str):
        kept = "".join(re.findall(r"w[abm]\d+z|f_|</?think>|\n", value))
        return kept if WORD.search(value) else value
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items()}
    return [_without(item) for item in value] if isinstance(value, list | tuple) else value


def _supervised(tokenizer: Tokenizer, case: Case, begun: str | None, *, every: bool) -> Iterator[str]:
    what = "all turns" if every else "last turn"
    try:
        (coded,) = tokenizer.encode_examples([Chat(case.messages, case.tools)], every=every)
    except UserError as error:
        ends = tokenizer.template is not None and tokenizer.template.turn.end
        if case.plain and (ends or not every):
            yield f"{what}: a plain conversation is refused: {error}"
        return
    turns = tuple(i for i, message in enumerate(case.messages) if message["role"] == "assistant")
    turns = turns if every else turns[-1:]
    tokens = [-1 - token if token < 0 else token for token in coded]
    text = tokenizer.decode(tokens, special=True)
    trained = tokenizer.decode([-1 - token for token in coded if token < 0], special=True)
    yield from _lost(what, case.messages, text, turns)
    yield from _controls_of_example(tokenizer, what, tokens, case)
    for index, message in enumerate(case.messages):
        words = words_of({name: field for name, field in message.items() if name != "name"})
        if index in turns:
            if missing := [word for word in words if word not in trained]:
                yield f"{what}: {missing} of an assistant are not trained on"
        elif wrong := [word for word in words if word in trained]:
            yield f"{what}: {wrong} of {message['role']} are trained on"
    yield from _ends(tokenizer, what, trained)
    if begun is not None:
        template = tokenizer.template
        assert template is not None
        before = tokenizer.decode(tokens[: next(i for i, token in enumerate(coded) if token < 0)], special=True)
        expected = begun.removesuffix(template.turn.missing)
        if text.startswith(expected) and before not in (begun, expected):
            yield f"{what}: begins after {before[-40:]!r} instead of {expected[-40:]!r}"


def _ends(tokenizer: Tokenizer, what: str, trained: str) -> Iterator[str]:
    assert tokenizer.template is not None
    ends = [*tokenizer.template.ends, *tokenizer.template.control.findall(trained[-40:])]
    if not trained.rstrip("\n").endswith(tuple(ends)):
        yield f"{what}: ends with {trained[-20:]!r}"


def _controls_of_example(tokenizer: Tokenizer, what: str, tokens: list[int], case: Case) -> Iterator[str]:
    assert tokenizer.template is not None
    (coded,) = tokenizer.encode_examples([Chat(_without(case.messages), _without(case.tools))])
    control = tokenizer.template.control

    def names(ids: list[int]) -> list[str]:
        decoded = [tokenizer.decode([-1 - token if token < 0 else token], special=True) for token in ids]
        return [name for name in decoded if control.fullmatch(name)]

    if names(tokens) != names(coded):
        yield f"{what}: control tokens {names(tokens)} instead of {names(coded)}"
