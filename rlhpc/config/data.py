"""Which prompts a run learns from and is measured on, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rlhpc.config.section import ImportPath, NonNegativeFloat, PositiveFloat, PositiveInt, Section

Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # letters, digits and . _ -


class DataFile(Section):
    """A prompt file; one of which only the path is given may be written as that path."""

    path: Path
    """.parquet or .jsonl"""
    weight: PositiveFloat | None = None
    """Share of the training prompts that are taken from this file, relative to the others'; all of them have one, or
    none."""
    name: Name | None = None
    """Of the held-out set that the file belongs to, which has metrics of its own."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value

    @model_serializer(mode="wrap")
    def _as_path(self, handler: SerializerFunctionWrapHandler) -> Any:
        fields = {name: value for name, value in handler(self).items() if value is not None}
        return fields["path"] if len(fields) == 1 else fields


class _OrPath:
    """Says in the schema that a path alone will do."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string", "format": "path"}, handler(core_schema)]}


PathOrFile = Annotated[DataFile, _OrPath()]


class DataSection(Section):
    train: list[PathOrFile] = []
    """Prompt files for RL, .parquet or .jsonl, with columns prompt (messages), data_source, reward_model,
    extra_info; each a path, or {path, weight} to mix files in those proportions."""
    validation: list[PathOrFile] = []
    """Held-out prompt files of the same form; each a path, or {path, name} for a set with metrics of its own."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, the chat template's tokens included."""
    min_prompt_tokens: PositiveInt = 1
    """Shorter prompts are dropped."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with a prompt longer than max_prompt_tokens; truncate_left keeps its last tokens."""
    filter: ImportPath | None = None
    """Called as function(row) with each training row as it is in the file; rows for which it is false are left out."""
    shuffle: bool = True
    """Take training prompts in a new order in each pass over them; false: in the files' order."""
    chat_template: bool | Path = True
    """Render messages with the tokenizer's chat template, or with the one in a Jinja file; false: join their contents
    as they are."""
    template_arguments: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message of its own."""
    continue_final_message: bool = False
    """A prompt whose last message is the assistant's is continued where that ends; false: it is an error."""


class ValidationSection(Section):
    every: PositiveInt = 10
    """RL steps between validations; one is made before the first step and after the last as well."""
    temperature: NonNegativeFloat = 0.0
    """Of the responses; 0: always the likeliest token."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each held-out prompt; with more than one, pass@k is reckoned from them."""
    success: float = 1.0
    """A response is correct when its reward is at least this."""
    max_prompts: PositiveInt | None = None
    """Use only so many prompts of each held-out set, the first ones; default: all."""
