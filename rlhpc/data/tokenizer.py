"""The model's HuggingFace tokenizer: prompts to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.data import DataSection
from rlhpc.core.errors import UserError, one_line

Messages = Sequence[Mapping[str, Any]]  # each with role and content
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions


@dataclass(frozen=True)
class Chat:
    """A conversation with the tools that it may call, none or None for those of every conversation."""

    messages: Messages
    tools: Tools | None = None


Text = str | Messages | Chat


class Tokenizer:
    """Renders prompts with the chat template, or joins their contents as they are.

    ``end_tokens`` are the ids that end a response, the first one being what supervised responses are closed with.
    """

    def __init__(self, inner: Any, end_tokens: tuple[int, ...], section: DataSection) -> None:
        self._inner, self.end_tokens, self._section = inner, end_tokens, section

    @classmethod
    def load(cls, folder: Path, vocab_size: int, section: DataSection) -> Tokenizer:
        """From the files in a model folder; ``vocab_size`` is the model's."""
        from transformers import AutoTokenizer

        try:
            inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises whatever its many formats raise
            raise UserError(
                f"no tokenizer can be loaded ({type(error).__name__}: {one_line(str(error))[:200]})",
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
        """Token ids of each prompt, up to where the model's answer begins.

        ``tools`` are shown in every conversation that has none of its own.
        """
        return self._encode(
            [self._render(prompt, tools) for prompt in prompts], special=not self._section.chat_template
        )

    def encode_responses(self, responses: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of each response as the model should give it, closed by the end token."""
        return [(*tokens, self.end_tokens[0]) for tokens in self._encode(responses, special=False)]

    def encode_conversations(self, conversations: Sequence[Messages]) -> list[tuple[int, ...]]:
        """Token ids of whole conversations, the model's last turn with its end."""
        if not self._section.chat_template:
            return self._encode([self._join(messages, None) for messages in conversations], special=True)
        texts = [self._apply(self._with_system_prompt(messages), None, False) for messages in conversations]
        return self._encode(texts, special=False)

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of token ids, without special tokens unless asked for."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._encode([text], special=False)[0])

    def tool_turn(self, answers: Sequence[str]) -> tuple[int, ...]:
        """What the chat template puts between a turn that called tools and the model's next one: the first one's end,
        which the model may have drawn itself, the answers, and all around them."""
        return self._encode([self._between_turns([self.defused(answer) for answer in answers])], special=False)[0]

    def tool_answers(self, tokens: Sequence[int]) -> list[str]:
        """The answers of which ``tool_turn`` made the tokens, which may lack their first, the end of a turn."""
        one, other = "answer1", "answer2"
        before, _, rest = self._between_turns([one, other]).partition(one)
        between, _, after = rest.partition(other)
        text = self.decode(tokens, special=True)
        opening = self.decode(self._encode([before], special=False)[0][1:], special=True)
        text = text.removeprefix(before) if text.startswith(before) else text.removeprefix(opening)
        text = text.removesuffix(after)
        return text.split(between) if between else [text]

    def defused(self, text: str) -> str:
        """Without the names of special tokens, which would be taken for these."""
        for name in self._inner.all_special_tokens:
            text = text.replace(name, f"{name[0]} {name[1:]}")
        return text

    def check_tool_turns(self) -> None:
        """A UserError unless the chat template knows of tools' answers."""
        if not self._section.chat_template:
            raise UserError(
                "tools need a chat template", where="data.chat_template", remedy="set it to true, or to a Jinja file"
            )
        if "42" not in self._between_turns(["42"]):
            raise UserError(
                "the chat template does not show what tools answer",
                where="data.chat_template",
                remedy="use one that has messages of the role tool",
            )

    def _between_turns(self, answers: Sequence[str]) -> str:
        """From the end of a turn's text to where the next one's begins."""
        said = "a call"
        before = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": said}]
        opened, whole = (
            self._apply([*before, *[{"role": "tool", "content": answer} for answer in shown]], None, shown != [])
            for shown in ([], list(answers))
        )
        start = opened.rfind(said) + len(said)
        if start < len(said) or not whole.startswith(opened[:start]):
            raise UserError(
                "the chat template writes a turn in another way once tools have answered it",
                where="data.chat_template",
                remedy="use one that only appends messages of the role tool",
            )
        return whole[start:]

    def _render(self, prompt: Text, tools: Tools | None) -> str:
        """The text that is tokenized; for the template a plain text is one user message."""
        if isinstance(prompt, Chat):
            prompt, tools = prompt.messages, prompt.tools or tools
        if not self._section.chat_template:
            return self._join(prompt, tools)
        messages = self._with_system_prompt(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        continues = self._section.continue_final_message and messages[-1]["role"] == "assistant"
        return self._apply(messages, self._shown(tools), not continues, continues)

    def _apply(self, messages: Messages, tools: Tools | None, generate: bool, continues: bool = False) -> str:
        """The chat template's text of messages; ``generate``: up to where the model's turn begins."""
        from jinja2 import TemplateError

        try:
            return str(
                self._inner.apply_chat_template(
                    list(messages),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generate,
                    continue_final_message=continues,
                    **self._section.template_arguments,
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(
                f"the chat template refuses {str(messages)[:80]} ({one_line(str(error))[:200]})",
                where="data.chat_template",
                remedy="correct the messages or data.template_arguments, or set it to false",
            ) from None

    def _join(self, prompt: str | Messages, tools: Tools | None) -> str:
        if tools:
            raise UserError(
                "tools are shown to the model by a chat template, and there is none", where="data.chat_template"
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

    def _shown(self, tools: Tools | None) -> list[Mapping[str, Any]] | None:
        """What the template gets; one that says nothing of tools would leave them out without a word."""
        if not tools:
            return None
        if "tools" not in str(self._inner.chat_template):
            raise UserError(
                "the chat template does not show tools", where="data.chat_template", remedy="use one that does"
            )
        return list(tools)

    def _encode(self, texts: Sequence[str], special: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [tuple(ids) for ids in self._inner(list(texts), add_special_tokens=special)["input_ids"]]


def with_tools(prompt: str | Messages, row: Mapping[str, Any], place: str) -> Text:
    """The prompt with what the row's column ``tools`` says: schemas, or the JSON text of them, since parquet gives
    every schema of a column the fields of all."""
    value = row.get("tools")
    if not value:
        return prompt
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"column 'tools' is {value!r:.80}", where=place, remedy="write a list of JSON schemas, or it as a text"
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
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ends = [tokenizer_end, *(named if isinstance(named, list) else [named])]
    unique = tuple(dict.fromkeys(end for end in ends if end is not None))
    if not unique:
        raise UserError(
            "neither the tokenizer nor generation_config.json names an end token",
            where=str(folder),
            remedy="set eos_token in tokenizer_config.json",
        )
    return unique
