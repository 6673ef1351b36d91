"""Checks of keys of data, validation and checkpoints against each other."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import Faults, UserError, did_you_mean


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


def check_keep_best(config: RunConfig) -> None:
    """Refuses a metric that validation does not produce."""
    name = config.checkpoint.keep_best
    if name is None:
        return
    if not config.data.validation:
        raise UserError(
            f"{name!r} is a metric of validation, and there is none",
            where="checkpoint.keep_best",
            remedy="name files in data.validation, or remove the key",
        )
    asked = name.removeprefix("validation/")
    known = validation_metrics(config)
    of_source = asked.startswith("by_source/") and asked.rpartition("/")[2] in known
    if asked not in known and not of_source:
        raise UserError(
            f"validation has no metric {name!r}", where="checkpoint.keep_best", remedy=did_you_mean(asked, known)
        )


def check_export(config: RunConfig) -> None:
    """Refuses exports of a best checkpoint that the run does not have, and a choice among exports that it does not
    write."""
    section = config.checkpoint
    if section.export == "none" and section.export_at != "last":
        raise UserError(
            f"{section.export_at!r}, but checkpoint.export is none",
            where="checkpoint.export_at",
            remedy="set checkpoint.export to hf, or remove the key",
        )
    if section.export_at == "best" and section.keep_best is None:
        raise UserError(
            "'best', but no validation metric decides which checkpoint is the best one",
            where="checkpoint.export_at",
            remedy="set checkpoint.keep_best, or choose last or all",
        )


def validation_metrics(config: RunConfig) -> list[str]:
    """Returns the metrics of a validation, for all prompts and for each named set (docs/evaluation.md)."""
    count = config.validation.samples_per_prompt
    sizes = sorted({*(1 << power for power in range(count.bit_length())), count})
    names = ["reward_mean", *(f"pass@{size}" for size in sizes), "response_length", "truncated_fraction"]
    names += [f"mean@{count}", f"maj@{count}"] if count > 1 else []
    sets = dict.fromkeys(file.name for file in config.data.validation if file.name is not None)
    return names + [f"by_set/{group}/{name}" for group in sets for name in names]
