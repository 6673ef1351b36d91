"""The model's HuggingFace tokenizer, and responses as chat messages."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.api import Sample
from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.inputs import read_json_object
from rlhpc.data.chat_template import Chat, ChatTemplate
from rlhpc.data.message_texts import Messages, Tools, mark

_log = logging.getLogger(__name__)

Text = str | Messages | Chat


class Tokenizer:
    """Renders prompts with the chat template, or concatenates their contents without one.

    ``end_tokens`` are the ids that end a response: the model's, then the template's.
    """

    def __init__(self, inner: Any, end_tokens: tuple[int, ...], section: DataSection) -> None:
        self._inner, self._section = inner, section
        self._end = end_tokens[0]
        self.template = self._template(end_tokens) if section.chat_template else None
        self.end_tokens = end_tokens
        for name in self.template.ends if self.template else ():
            token = inner.convert_tokens_to_ids(name)
            if token not in self.end_tokens and inner.convert_ids_to_tokens(token) == name:
                _log.info("%s, the chat template's end of a turn, ends responses too", name)
                self.end_tokens += (token,)

    def _template(self, end_tokens: Sequence[int]) -> ChatTemplate:
        section, names = self._section, [str(self._inner.convert_ids_to_tokens(end)) for end in end_tokens]
        moment = section.template_time or datetime.now()
        return ChatTemplate(self._inner, section.template_arguments, moment, names)

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

    @property
    def inner(self) -> Any:
        """The tokenizer of transformers."""
        return self._inner

    def encode_prompts(self, prompts: Sequence[Text], tools: Tools | None = None) -> list[tuple[int, ...]]:
        """Token ids of each prompt, up to where the response begins. ``tools`` are shown in conversations without their
        own."""
        chats = [self._chat(prompt, tools) for prompt in prompts]
        if self.template is None:
            return self._encode([self._join(chat) for chat in chats], special=True)
        continues = self._section.continue_final_message
        return self._encode([self.template.prompt(chat, continues=continues) for chat in chats], special=False)

    def encode_conversations(self, conversations: Sequence[Text]) -> list[tuple[int, ...]]:
        """Token ids of whole conversations, including the end of the last turn."""
        chats = [self._chat(conversation, None) for conversation in conversations]
        if self.template is None:
            return self._encode([self._join(chat) for chat in chats], special=True)
        return self._encode([self.template.conversation(chat) for chat in chats], special=False)

    def disarmed(self, sample: Sample) -> np.ndarray:
        """int32 tokens of a sample; control tokens that the policy sampled within its turns are written as texts."""
        if self.template is None:
            return sample.tokens
        found: list[Sequence[int]] = [sample.tokens[: sample.prompt_len].tolist()]
        for of_policy, part in split_turns(sample):
            tokens = part.tolist()
            ends = [token for token in tokens[-1:] if token in self.end_tokens]
            text = self.decode(tokens[: len(tokens) - len(ends)], special=True) if of_policy else ""
            if of_policy and self.template.control.search(text):
                tokens = [*self._encode([self.template.defused(text)], special=False)[0], *ends]
            found.append(tokens)
        return np.concatenate([np.array(part, dtype=np.int32) for part in found])

    def encode_examples(self, examples: Sequence[Text], *, every: bool = False) -> list[list[int]]:
        """Token ids of conversations that end with the assistant; those that are trained on as ``-1 - id``.

        ``every``: all turns of the assistant are, not only the last.
        """
        return [self._example(self._chat(example, None), every=every) for example in examples]

    def _example(self, chat: Chat, *, every: bool) -> list[int]:
        if self.template is None:
            *before, last = chat.messages
            (prompt,) = self._encode([self._join(Chat(before))], special=True)
            (response,) = self._encode([last["content"]], special=False)
            return [*prompt, *(-1 - token for token in (*response, self._end))]
        text, spans = self.template.turns(chat, every=every)
        found = self._inner(text, add_special_tokens=False)
        tokens = list(found["input_ids"])
        if not every:  # as RL has them: a token does not reach from the prompt into the response
            ((start, end),) = spans
            begun, rest = (list(part) for part in self._encode([text[:start], text[start:]], special=False))
            if tokens[: len(begun)] != begun:
                trained = len(self._encode([text[start:end]], special=False)[0])
                return [*begun, *(-1 - token for token in rest[:trained]), *rest[trained:]]
        for start, end in spans:
            first, last = found.char_to_token(start), found.char_to_token(end - 1)
            if first is None:
                break
            places = range(first, (len(tokens) - 1 if last is None else last) + 1)
            tokens[places.start : places.stop] = [-1 - token for token in tokens[places.start : places.stop]]
        return tokens

    def decode(self, tokens: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Text of token ids; ``special``: with special tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self._encode([text], special=False)[0])

    def tool_turn(self, answers: Sequence[str], names: Sequence[str] = ()) -> tuple[int, ...]:
        """Tokens from a turn that called tools to the next turn: the end of the first, which the model may have sampled
        itself, then the answers of the tools ``names`` as the chat template frames them."""
        return self._encode([self._between_turns(answers, names)], special=False)[0]

    def tool_answers(self, tokens: Sequence[int]) -> list[str]:
        """Inverse of ``tool_turn``, also without its first token, the end of the turn."""
        one, other = "answer1", "answer2"
        before, _, rest = self._between_turns([one, other]).partition(one)
        between, _, after = rest.partition(other)
        first = self.decode(self._encode([before], special=False)[0][:1], special=True)
        begun, middle, end = (
            re.escape(part).replace(mark(1), ".*?") for part in (before[len(first) :], between, after)
        )
        text = re.sub(f"^({re.escape(first)})?{begun}", "", self.decode(tokens, special=True), count=1, flags=re.DOTALL)
        found = re.split(middle, re.sub(f"{end}$", "", text)) if between else [text.removesuffix(after)]
        quoted = before.endswith('"') and after.startswith('"')  # written as JSON
        return [str(json.loads(f'"{answer}"')) for answer in found] if quoted else found

    def check_tool_turns(self) -> None:
        """Raises a UserError unless the chat template renders tools' answers."""
        self._between_turns(["42"])

    def _between_turns(self, answers: Sequence[str], names: Sequence[str] = ()) -> str:
        if self.template is None:
            raise _needs_template()
        return self.template.between_turns(answers, names)

    def _chat(self, prompt: Text, tools: Tools | None) -> Chat:
        """A conversation with tools and a system prompt; a plain text is one user message."""
        chat = prompt if isinstance(prompt, Chat) else Chat(as_messages(prompt))
        messages, system = list(chat.messages), self._section.system_prompt
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return replace(chat, messages=messages, tools=chat.tools or tools)

    def _join(self, chat: Chat) -> str:
        if chat.tools:
            raise _needs_template()
        return "".join(message["content"] for message in chat.messages)

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [tuple(ids) for ids in self._inner(list(texts), add_special_tokens=special)["input_ids"]]


def _needs_template() -> UserError:
    remedy = "set it to true, or to a Jinja file"
    return UserError("tools need a chat template", where="data.chat_template", remedy=remedy)


def as_messages(prompt: str | Messages) -> Messages:
    """The messages; a plain text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def with_tools(prompt: str | Messages, row: Mapping[str, Any], place: str) -> Chat:
    """The prompt with the schemas in the row's column ``tools``, a list or its JSON text. (In Parquet only the text
    works: a list's schemas would all get the fields of each other.)"""
    value = row.get("tools") or None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if value and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"column 'tools' is {value!r:.80}", where=place, remedy="write a list of JSON schemas, or its JSON text"
        )
    return Chat(as_messages(prompt), tools, place)


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
    messages: list[Any] = list(as_messages(prompt))
    if messages[-1]["role"] == "assistant":
        first, *response = response
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + first["content"]}
    return [*messages, *response]
