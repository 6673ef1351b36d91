"""Checks the keys of data and validation against each other."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError


def check_data(config: RunConfig) -> None:
    """Refuses keys without meaning."""
    Faults(_faults(config)).raise_all()


def _faults(config: RunConfig) -> Iterator[UserError]:
    data, validation = config.data, config.validation
    weighted = [file.weight is not None for file in data.train]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        yield UserError(
            f"{str(data.train[index].path)!r} has no weight, others have", where=f"data.train.{index}", remedy="add one"
        )
    for index, file in enumerate(data.validation):
        if file.weight is not None:
            yield UserError(
                "validation files are not mixed", where=f"data.validation.{index}.weight", remedy="remove it"
            )
    if data.min_prompt_tokens > data.max_prompt_tokens:
        yield UserError(
            f"{data.min_prompt_tokens} is above data.max_prompt_tokens {data.max_prompt_tokens}",
            where="data.min_prompt_tokens",
            remedy="lower it",
        )
    if validation.samples_per_prompt > 1 and not validation.temperature:
        yield UserError(
            f"{validation.samples_per_prompt} responses to a prompt would all be the greedy one",
            where="validation.samples_per_prompt",
            remedy="set validation.temperature above 0, such as 1.0",
        )
