"""The model's HuggingFace tokenizer and chat template, and responses as chat messages.

Templates are code of others, whose CPU time is limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.api import Sample
from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.inputs import read_json_object

RENDER_SECONDS = 30.0  # CPU time to render one conversation, which takes milliseconds
Messages = Sequence[Mapping[str, Any]]  # each with role and content
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions


@dataclass(frozen=True)
class Chat:
    """A conversation with its own tools; without any, the run's tools apply."""

    messages: Messages
    tools: Tools | None = None


Text = str | Messages | Chat


class Tokenizer:
    """Renders prompts with the chat template, or concatenates their contents without one.

    ``end_tokens`` are the ids that end a response; supervised responses end with the first one.
    """

    def __init__(self, inner: Any, end_tokens: tuple[int, ...], section: DataSection) -> None:
        self._inner, self.end_tokens, self._section = inner, end_tokens, section

    @classmethod
    def load(cls, folder: Path, vocab_size: int, section: DataSection) -> Tokenizer:
        """Loads the tokenizer of a model folder; ``vocab_size`` is the model's."""
        from transformers import AutoTokenizer

        try:
            inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the formats that transformers reads raise errors of many types
            raise UserError(
                f"the tokenizer cannot be loaded ({type(error).__name__}: {one_line(str(error))[:200]})",
                where=str(folder),
                remedy="save the tokenizer into the model folder with save_pretrained",
            ) from error
        if isinstance(section.chat_template, Path):
            inner.chat_template = _read_template(section.chat_template)
        if section.chat_template and inner.chat_template is None:
            raise UserError(
                f"the tokenizer in {str(folder)!r} has no chat template",
                where="data.chat_template",
                remedy="set it to false, or to the path of a Jinja file, or add chat_template.jinja to the folder",
            )
        end_tokens = _end_tokens(folder, inner.eos_token_id)
        largest = max(inner.get_vocab().values())
        if max(largest, *end_tokens) >= vocab_size:
            raise UserError(
                f"token ids go up to {max(largest, *end_tokens)}, but config.json has vocab_size {vocab_size}",
                where=str(folder),
                remedy="use the tokenizer that belongs to the model",
            )
        return cls(inner, end_tokens, section)

    def encode_prompts(self, prompts: Sequence[Text], tools: Tools | None = None) -> list[tuple[int, ...]]:
        """Token ids of each prompt, up to where the response begins. ``tools`` are shown in conversations without their
        own."""
        return self._encode(
            [self._render(prompt, tools) for prompt in prompts], special=not self._section.chat_template
        )

    def encode_responses(self, responses: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of each response, with the end token."""
        return [(*tokens, self.end_tokens[0]) for tokens in self._encode(responses, special=False)]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[tuple[int, ...]]:
        """Token ids of whole conversations, including the end of the last turn."""
        if not self._section.chat_template:
            return self._encode([self._join(messages, None) for messages in conversations], special=True)
        texts = [self._apply(self._with_system_prompt(messages), None, generate=False) for messages in conversations]
        return self._encode(texts, special=False)

    def decode(self, tokens: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Text of token ids; ``special``: with special tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self._encode([text], special=False)[0])

    def tool_turn(self, answers: Sequence[str]) -> tuple[int, ...]:
        """Tokens from a turn that called tools to the next turn: the end of the first, which the model may have sampled
        itself, then the answers as the chat template frames them."""
        return self._encode([self._between_turns([self.defused(answer) for answer in answers])], special=False)[0]

    def tool_answers(self, tokens: Sequence[int]) -> list[str]:
        """Inverse of ``tool_turn``, also without its first token, the end of the turn."""
        one, other = "answer1", "answer2"
        before, _, rest = self._between_turns([one, other]).partition(one)
        between, _, after = rest.partition(other)
        text = self.decode(tokens, special=True)
        opening = self.decode(self._encode([before], special=False)[0][1:], special=True)
        text = text.removeprefix(before) if text.startswith(before) else text.removeprefix(opening)
        text = text.removesuffix(after)
        return text.split(between) if between else [text]

    def defused(self, text: str) -> str:
        """The text with a space in the names of special tokens, so that they are not encoded as such."""
        for name in self._inner.all_special_tokens:
            text = text.replace(name, f"{name[0]} {name[1:]}")
        return text

    def check_tool_turns(self) -> None:
        """Raises a UserError unless the chat template renders tools' answers."""
        if not self._section.chat_template:
            raise UserError(
                "tools need a chat template", where="data.chat_template", remedy="set it to true, or to a Jinja file"
            )
        if "42" not in self._between_turns(["42"]):
            raise UserError(
                "the chat template does not render tools' answers",
                where="data.chat_template",
                remedy="use one that supports messages of the role tool",
            )

    def _between_turns(self, answers: Sequence[str]) -> str:
        """Text from the end of one turn to the beginning of the next."""
        call = "a call"
        before = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": call}]
        opened, whole = (
            self._apply(
                [*before, *[{"role": "tool", "content": answer} for answer in given]], None, generate=bool(given)
            )
            for given in ([], list(answers))
        )
        start = opened.rfind(call) + len(call)
        if start < len(call) or not whole.startswith(opened[:start]):
            raise UserError(
                "the chat template renders a turn differently once tools have answered it",
                where="data.chat_template",
                remedy="use one that only appends messages of the role tool",
            )
        return whole[start:]

    def _render(self, prompt: Text, tools: Tools | None) -> str:
        """Text of a prompt; for the template, a plain text is one user message."""
        if isinstance(prompt, Chat):
            tools = prompt.tools or tools
            prompt = prompt.messages
        if not self._section.chat_template:
            return self._join(prompt, tools)
        messages = self._with_system_prompt(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        continues = self._section.continue_final_message and messages[-1]["role"] == "assistant"
        return self._apply(messages, self._for_template(tools), generate=not continues, continues=continues)

    def _apply(self, messages: Messages, tools: Tools | None, *, generate: bool, continues: bool = False) -> str:
        """Messages rendered by the chat template; ``generate``: up to where the model's turn begins."""
        from jinja2 import TemplateError

        try:
            with cpu_limit(RENDER_SECONDS):
                text = self._inner.apply_chat_template(
                    list(messages),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generate,
                    continue_final_message=continues,
                    **self._section.template_arguments,
                )
        except CpuTimeExceeded:
            raise UserError(
                f"the chat template takes more than {RENDER_SECONDS:g} s for {str(messages)[:80]}",
                where="data.chat_template",
                remedy="use one whose loops end",
            ) from None
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(
                f"the chat template rejects {str(messages)[:80]} ({one_line(str(error))[:200]})",
                where="data.chat_template",
                remedy="correct the messages or data.template_arguments, or set it to false",
            ) from None
        return str(text)

    def _join(self, prompt: str | Messages, tools: Tools | None) -> str:
        if tools:
            raise UserError(
                "tools need a chat template", where="data.chat_template", remedy="set it to true, or to a Jinja file"
            )
        before = self._section.system_prompt or ""
        if isinstance(prompt, str):
            return before + prompt
        return "".join(message["content"] for message in self._with_system_prompt(prompt))

    def _with_system_prompt(self, messages: Messages) -> list[Mapping[str, Any]]:
        text = self._section.system_prompt
        if text is None or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": text}, *messages]

    def _for_template(self, tools: Tools | None) -> list[Mapping[str, Any]] | None:
        """The tools; a UserError if the template would silently ignore them."""
        if not tools:
            return None
        if "tools" not in str(self._inner.chat_template):
            raise UserError(
                "the chat template does not render tools", where="data.chat_template", remedy="use one that does"
            )
        return list(tools)

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [tuple(ids) for ids in self._inner(list(texts), add_special_tokens=special)["input_ids"]]


def with_tools(prompt: str | Messages, row: Mapping[str, Any], place: str) -> Text:
    """The prompt with the schemas in the row's column ``tools``, a list or its JSON text. (In Parquet only the text
    works: a list's schemas would all get the fields of each other.)"""
    value = row.get("tools")
    if not value:
        return prompt
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"column 'tools' is {value!r:.80}", where=place, remedy="write a list of JSON schemas, or its JSON text"
        )
    return Chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, tools)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read ({error})", where="data.chat_template") from None


def _end_tokens(folder: Path, tokenizer_end: int | None) -> tuple[int, ...]:
    """The tokenizer's end token first, then those of generation_config.json."""
    file = folder / "generation_config.json"
    named = read_json_object(file).get("eos_token_id") if file.is_file() else None
    ends = [tokenizer_end, *(named if isinstance(named, list) else [named])]
    unique = tuple(dict.fromkeys(end for end in ends if end is not None))
    if not all(type(end) is int for end in unique):
        raise UserError(f"eos_token_id = {str(named)[:80]} is not a token's id", where=str(file), remedy="correct it")
    if not unique:
        raise UserError(
            "neither the tokenizer nor generation_config.json names an end token",
            where=str(folder),
            remedy="set eos_token in tokenizer_config.json",
        )
    return unique


class CpuTimeExceeded(BaseException):
    """Raised inside the limited code, which therefore must not catch it as an Exception."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises CpuTimeExceeded in the block when its thread has used ``seconds`` of CPU time, between two instructions of
    the interpreter: a call of native code ends first."""
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    limit = time.clock_gettime(clock) + seconds
    lock, done = threading.Lock(), threading.Event()
    exceeded = False

    def watch() -> None:
        nonlocal exceeded
        left = seconds
        while not done.wait(left):
            with lock:
                if done.is_set():
                    return
                left = limit - time.clock_gettime(clock)
                if left <= 0:
                    exceeded = True
                    _raise_in(thread)
                    return

    threading.Thread(target=watch, name="cpu-limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
            if exceeded:
                _catch(thread)


def _raise_in(thread: int) -> None:
    """Raises CpuTimeExceeded in a thread at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CpuTimeExceeded))


def _catch(thread: int) -> None:
    """Catches what may not have been raised yet in this thread.

    Only an exception that is raised clears the interpreter's flag. One that is withdrawn, with NULL, leaves it set:
    each call is slower then, and one under a profiler or debugger never starts (CPython 3.11, Python/ceval.c).
    """
    try:
        _raise_in(thread)
        while True:
            pass
    except CpuTimeExceeded:
        pass


Message = dict[str, Any]


def response_messages(tokenizer: Tokenizer, sample: Sample) -> list[Message]:
    """The response as messages: turns of the policy with the role assistant, answers of tools with the role tool.

    A response whose tokens are all masked (``train.mask_truncated``) is one turn.
    """
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None or not sample.response_mask.any():
        return [{"role": "assistant", "content": tokenizer.decode(response)}]
    messages: list[Message] = []
    for of_policy, part in split_turns(sample):
        if of_policy:
            messages.append({"role": "assistant", "content": tokenizer.decode(part)})
        else:
            messages += [{"role": "tool", "content": answer} for answer in tokenizer.tool_answers(part.tolist())]
    return messages


def split_turns(sample: Sample) -> list[tuple[bool, np.ndarray]]:
    """(sampled by the policy, tokens) of each turn of the response, and of the tools' answers between turns."""
    response = sample.tokens[sample.prompt_len :]
    if sample.response_mask is None:
        return [(True, response)]
    edges = np.flatnonzero(np.diff(sample.response_mask)) + 1
    starts = [0, *edges.tolist()]
    return [(bool(sample.response_mask[i]), part) for i, part in zip(starts, np.split(response, edges), strict=True)]


def whole_conversation(prompt: str | Messages, response: Sequence[Message]) -> list[Message]:
    """Messages of prompt and response; a prompt that ends in an assistant's message is continued by the first turn."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] == "assistant":
        first, *response = response
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + first["content"]}
    return [*messages, *response]
