"""Sections of training and validation data."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rlhpc.config.rollout import SamplingOverrides
from rlhpc.config.section import FileName, ImportPath, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class DataFile(Section):
    """A prompt file; written as its path alone where no other key is set."""

    path: Path
    """Path to a .parquet or .jsonl file."""
    weight: PositiveFloat | None = None
    """Relative share of the training prompts taken from this file; given for all files or none."""
    name: FileName | None = None
    """Name of the validation set that the file belongs to, with its own metrics."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | Path) else value

    @model_serializer(mode="wrap")
    def _as_path(self, handler: SerializerFunctionWrapHandler) -> Any:
        fields = {name: value for name, value in handler(self).items() if value is not None}
        return fields["path"] if len(fields) == 1 else fields


class _OrPath:
    """Allows a plain path in the JSON schema."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string", "format": "path"}, handler(core_schema)]}


PathOrFile = Annotated[DataFile, _OrPath()]


class DataSection(Section):
    train: list[PathOrFile] = []
    """Paths of prompt files for RL, .parquet or .jsonl, with verl's columns; or {path, weight} to mix files in
    proportion."""
    validation: list[PathOrFile] = []
    """Paths of validation prompt files of the same form; or {path, name} for a set with its own metrics."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum prompt length in tokens, chat template included."""
    min_prompt_tokens: PositiveInt = 1
    """Minimum prompt length in tokens; shorter prompts are dropped."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """Action on a prompt longer than max_prompt_tokens; truncate_left keeps its last tokens."""
    filter: ImportPath | None = None
    """Import path of a filter called as function(row) with each training row; false drops the row."""
    shuffle: bool = True
    """Shuffling of training prompts, in another order each epoch; false: file order."""
    chat_template: bool | Path = True
    """Chat template for messages: the tokenizer's (true), a Jinja file, or none (false): contents are concatenated."""
    template_arguments: dict[str, Any] = {}
    """Variables passed to the chat template, such as enable_thinking."""
    template_time: datetime | None = None
    """Time that the chat template takes for the present, such as 2026-11-28T12:00; default: the run's start."""
    system_prompt: str | None = None
    """System prompt of conversations without one."""
    continue_final_message: bool = False
    """Continuation of a final assistant message in a prompt; false: such a prompt is an error."""


class ValidationSection(Section):
    every: PositiveInt = 10
    """Interval between validations in RL steps; one runs before the first step and after the last as well."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    sampling: SamplingOverrides = SamplingOverrides()
    """Keys of rollout.sampling, and top_p, that replace them in validation."""
    samples_per_prompt: PositiveInt = 1
    """Number of responses per validation prompt; with several, pass@k is computed."""
    success: float = 1.0
    """Minimum reward of a correct response."""
    max_prompts: PositiveInt | None = None
    """Maximum prompts of each validation set, from its start; default: all."""
