"""The model's HuggingFace tokenizer: prompts to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError, one_line

Messages = Sequence[Mapping[str, Any]]  # each with role and content
Text = str | Messages


class Tokenizer:
    """Renders prompts with the chat template, or joins their contents as they are.

    ``end_tokens`` are the ids that end a response, the first one being what supervised responses are closed with.
    """

    def __init__(self, inner: Any, end_tokens: tuple[int, ...], chat_template: bool) -> None:
        self._inner, self.end_tokens, self._chat = inner, end_tokens, chat_template

    @classmethod
    def load(cls, folder: Path, vocab_size: int, chat_template: bool) -> Tokenizer:
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
        if chat_template and inner.chat_template is None:
            raise UserError(
                f"the tokenizer in {str(folder)!r} has no chat template",
                where="data.chat_template",
                remedy="set it to false, or add chat_template.jinja to the folder",
            )
        end_tokens = _end_tokens(folder, inner.eos_token_id)
        largest = max(inner.get_vocab().values())
        if max(largest, *end_tokens) >= vocab_size:
            raise UserError(
                f"token ids go up to {max(largest, *end_tokens)}, but config.json has vocab_size {vocab_size}",
                where=str(folder),
                remedy="use the tokenizer that belongs to the model",
            )
        return cls(inner, end_tokens, chat_template)

    def encode_prompts(self, prompts: Sequence[Text]) -> list[tuple[int, ...]]:
        """Token ids of each prompt, up to where the model's answer begins."""
        return self._encode([self._render(prompt) for prompt in prompts], special=not self._chat)

    def encode_responses(self, responses: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of each response as the model should give it, closed by the end token."""
        return [(*tokens, self.end_tokens[0]) for tokens in self._encode(responses, special=False)]

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of token ids, without special tokens unless asked for."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=not special))

    def _render(self, prompt: Text) -> str:
        """The text that is tokenized; for the template a plain text is one user message."""
        if not self._chat:
            return prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        from jinja2 import TemplateError

        try:
            return str(self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise UserError(
                f"the chat template refuses {str(messages)[:80]} ({error})",
                where="data.chat_template",
                remedy="correct the messages, or set it to false",
            ) from None

    def _encode(self, texts: Sequence[str], special: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        return [tuple(ids) for ids in self._inner(list(texts), add_special_tokens=special)["input_ids"]]


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
