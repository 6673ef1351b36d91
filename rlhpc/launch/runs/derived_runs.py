"""Configurations of runs that are made from others: of `rlhpc eval`, and with `--replay RUN`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.saved import differing_keys
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run_registry import find_run

if TYPE_CHECKING:
    from rlhpc.convert.sides import Step

# Keys that do not change a bit of the responses and updates.
_FREE = (
    *("name", "run_dir", "prepare", "slurm", "recovery", "checkpoint", "observe", "profile", "planning", "site"),
    *("asynchrony.replay", "train.steps", "reshard"),
)
# Left open in a configuration, and predicted or chosen when the recorded run began.
_PREDICTED = ("data.template_time", "rollout.max_num_seqs", "actor.memory.accumulation", "asynchrony.costs")


def evaluation_of(
    config: RunConfig,
    model: Path | None = None,
    run: str | None = None,
    step: Step | None = None,
    name: str | None = None,
) -> RunConfig:
    """``config`` as a run that answers its held-out prompts once.

    Weights are those of ``model`` (a HuggingFace folder or a checkpoint), of a checkpoint of ``run`` (that
    of ``step``, by default the newest), or the config's own. Results go to eval/NAME of the run's folder, or of the
    working folder.
    """
    if model is not None and run is not None:
        raise UserError("excludes --run", where="--model", remedy="leave out one of them")
    if step is not None and run is None:
        raise UserError("applies to checkpoints of a run", where="--step", remedy="add --run")
    if not config.data.validation:
        raise UserError("no held-out prompts", where="data.validation", remedy="name at least one file")
    base, source = Path(), model
    if run is not None:
        base = source = find_run(run).folder.path
    section, title = config.model, config.name
    if source is not None:
        from rlhpc.convert.sides import read_side  # which needs numpy

        side = read_side(source, step, family=section.family, any_family=True)
        weights = side.home if side.home != side.model_folder else None
        section = section.model_copy(update={"path": side.model_folder, "weights": weights})
        title = side.home.parent.name if run is not None else source.name
    elif section.weights is not None:
        title = section.weights.parent.name
    title = re.sub(r"[^\w.-]", "_", name or title)
    return config.model_copy(
        update={
            "name": f"eval-{title}",
            "run_dir": base / "eval" / title,
            "model": section,
            "sft": None,
            "data": config.data.model_copy(update={"train": []}),
            "train": config.train.model_copy(update={"steps": 0}),
        }
    )


def with_replay(config: RunConfig, run: RunFolder) -> RunConfig:
    """The configuration that replays ``run``. Raises a UserError with the key and both values if it differs from the
    run's in a key that decides its bits."""
    config = absolute_paths(config)
    recorded = load_config(run.config)
    ours, theirs = config.model_dump(mode="json"), recorded.model_dump(mode="json")
    for key in _PREDICTED:
        _take_over(ours, theirs, key.split("."))
    ours["recovery"]["lost_engines"] = theirs["recovery"]["lost_engines"]  # on which random numbers depend
    ours["asynchrony"]["replay"] = str(run.path.absolute())
    for key, mine, known in differing_keys(ours, theirs, _FREE):
        raise UserError(f"{mine}, but {known} in the run that is replayed, {run.path}", where=key, remedy="use that")
    return RunConfig.model_validate(ours).in_one_job()


def _take_over(ours: dict[str, Any], theirs: Mapping[str, Any], keys: list[str]) -> None:
    """Takes the recorded value of a key, or of all keys of a section, where it is left open."""
    key, *more = keys
    if more:
        _take_over(ours[key], theirs[key], more)
    elif isinstance(ours[key], dict):
        for name in ours[key]:
            _take_over(ours[key], theirs[key], [name])
    elif ours[key] in (None, "auto"):
        ours[key] = theirs[key]
