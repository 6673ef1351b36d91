"""The configuration of a run that follows the recorded order of another one (`--replay RUN`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.config.compared import differing_keys
from rlhpc.config.load import absolute_paths, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder

# What does not change a bit of what is generated and trained on.
_FREE = (
    *("name", "run_dir", "prepare", "slurm", "recovery", "checkpoint", "observe", "profile", "planning", "site"),
    *("asynchrony.replay", "train.steps", "reshard"),
)
# Left open in a configuration, and predicted or chosen when the recorded run began.
_PREDICTED = ("rollout.max_num_seqs", "actor.memory.accumulation", "asynchrony.costs")


def with_replay(config: RunConfig, run: RunFolder) -> RunConfig:
    """The configuration that replays ``run``. Raises a UserError if it differs from the run's in what decides its
    bits: the key, both values."""
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
