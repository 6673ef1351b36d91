"""Checks all ground truths by the reward functions before a run, on all engines' reward workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhpc.api import Prompt, RewardWorkers, UnusableTruth
from rlhpc.config.schema import RunConfig
from rlhpc.data.files import place_of
from rlhpc.data.prompts import PromptSet
from rlhpc.parallel.transfer import gather_objects
from rlhpc.rewards.calls import Truth, unusable
from rlhpc.trainer.roles import EngineRank

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Place:
    """First place of a ground truth: the key of its files, and its row's number in them."""

    key: str
    number: int


def check_ground_truths(
    config: RunConfig,
    place: EngineRank,
    workers: RewardWorkers | None,
    train: PromptSet | None,
    validation: PromptSet | None,
) -> None:
    """Raises a UserError for the first row whose ground truth a reward function cannot use, and warns of it if
    reward_workers.on_failure is not error. ``workers``: on the first rank of each engine. Collective."""
    truths, places = _distinct(_prompts(config, train, validation))
    own = place.own(len(truths))
    mine = workers.unusable_truths([truths[index] for index in own]) if workers is not None else []
    parts = gather_objects([(own[found.index], found) for found in mine])
    known = sorted((entry for part in parts for entry in part or ()), key=lambda entry: entry[0])
    errors = [entry for entry in known if entry[1].action == "error"]
    for index, found in errors[:1]:
        raise unusable(truths[index][1], found.function, found.what, _shown(config, places[index]))
    if place.rank == 0:
        _warn(config, known, truths, places)


def _warn(
    config: RunConfig, known: Sequence[tuple[int, UnusableTruth]], truths: Sequence[Truth], places: Sequence[_Place]
) -> None:
    """Logs the first ground truth that each function cannot use."""
    logged = set()
    for index, found in known:
        if found.function not in logged:
            logged.add(found.function)
            error = unusable(truths[index][1], found.function, found.what, _shown(config, places[index]))
            handled = {"zero": "counts as 0", "drop": "are dropped"}[found.action]
            _log.warning("%s: %s; a reward for it %s; others are not logged", error.where, error.message, handled)


def _prompts(
    config: RunConfig, train: PromptSet | None, validation: PromptSet | None
) -> Iterator[tuple[str, Sequence[Prompt]]]:
    if train is not None:
        yield "data.train", train.prompts.rows
    if validation is not None:
        yield "data.validation", [prompt for _, prompt in validation.first(config.validation.max_prompts)]


def _distinct(sets: Iterator[tuple[str, Sequence[Prompt]]]) -> tuple[list[Truth], list[_Place]]:
    """Each ground truth once, and where it is first."""
    first: dict[tuple[str, str], tuple[Truth, _Place]] = {}
    for key, prompts in sets:
        for prompt in prompts:
            known = (prompt.data_source, repr(prompt.ground_truth))
            if known not in first:
                first[known] = (prompt.data_source, prompt.ground_truth), _Place(key, prompt.prompt_id)
    return [truth for truth, _ in first.values()], [place for _, place in first.values()]


def _shown(config: RunConfig, place: _Place) -> str:
    files = config.data.train if place.key == "data.train" else config.data.validation
    return place_of([file.path for file in files], place.key, place.number)
