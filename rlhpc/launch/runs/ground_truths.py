"""Quick check of ground truths before a run is submitted. Its ranks check all of them more thoroughly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.core.imports import import_attribute
from rlhpc.data.files import read_column
from rlhpc.rewards.ground_truths import unusable

_SECONDS = 3.0  # for all files: the ranks check what is left
_BUILT_IN = "rlhpc.rewards."


def check_ground_truths(configs: Sequence[RunConfig], seconds: float = _SECONDS) -> Iterator[str]:
    """Refuses the first row whose ground truth a built-in function cannot use, and warns of it if
    reward_workers.on_failure is not error.

    A user's functions run in the job only, and so does data.filter: training files with one are left to the ranks.
    """
    deadline = time.monotonic() + seconds
    known = []
    for config in configs:  # an array of runs often has the same files
        inputs = (
            config.data,
            config.validation,
            config.rewards,
            config.reward_workers.on_failure,
            config.train.steps > 0,
        )
        if inputs not in known:
            known.append(inputs)
            yield from _check(config, deadline)


def _check(config: RunConfig, deadline: float) -> Iterator[str]:
    checks = dict(_checks(config))
    for place, value in _truths(config) if checks else ():
        for path, check in tuple(checks.items()):
            try:
                if value is not None:  # else the ranks refuse the row
                    check(data_source="", ground_truth=value)
            except (ValueError, RecursionError) as error:
                refused = unusable(value, path, str(error), place)
                if config.reward_workers.on_failure == "error":
                    raise refused from None
                del checks[path]
                yield f"{place}: {refused.message}; others are not shown"
        if not checks or time.monotonic() > deadline:
            return


def _checks(config: RunConfig) -> Iterator[tuple[str, Callable[..., None]]]:
    """The quick checks of built-in functions, by their import paths."""
    for key, entry in config.reward_functions.items():
        if entry.function.startswith(_BUILT_IN):
            check = getattr(import_attribute(entry.function, f"{key}.function"), "quick_check", None)
            if check is not None:
                yield entry.function, check


def _truths(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """(place, ground truth or None) of rows that the run uses."""
    sets: dict[str, int] = {}
    if config.train.steps and config.data.filter is None:
        for index, file in enumerate(config.data.train):
            yield from _of_file(file.path, f"data.train.{index}", None)
    most = config.validation.max_prompts
    for index, file in enumerate(config.data.validation):
        name = file.name or ""
        left = None if most is None else max(0, most - sets.get(name, 0))
        for found in _of_file(file.path, f"data.validation.{index}", left):
            sets[name] = sets.get(name, 0) + 1
            yield found


def _of_file(path: Path, where: str, most: int | None) -> Iterator[tuple[str, Any]]:
    if not path.is_file():  # config.prepare makes it
        return
    try:
        for place, column in itertools.islice(read_column(path, where, "reward_model"), most):
            truth = column.get("ground_truth") if isinstance(column, dict) else None
            yield place, truth
    except ImportError:  # a login node may lack pyarrow
        return
