"""Checks the models beside the actor that have ranks of their own, and those ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhpc.config.algorithm import WITH_CRITIC
from rlhpc.config.model_settings import (
    critic_settings,
    models_on,
    reference_settings,
    reward_model_settings,
)
from rlhpc.config.schema import RunConfig
from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.models import ModelDescription
from rlhpc.plan.checks.backend import model_layout
from rlhpc.sharding.layout import JOB_RANKS, ParallelLayout, make_layout
from rlhpc.sharding.placement import backend_for, judge_ranks

_SETTINGS = {"reference": reference_settings, "critic": critic_settings, "reward model": reward_model_settings}


def judges_key(config: RunConfig) -> str:
    """The key that sets the number of ranks."""
    return "judges.nodes" if config.judges.nodes else "judges.ranks"


def judge_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys of judges that contradict each other, or the placement. Of a run with RL steps."""
    if config.reference.parallel is not None and config.reference.on != "judges":
        yield UserError(
            f"the reference model on {config.reference.on} has no layout of its own",
            where="reference.parallel",
            remedy="leave it out, or set reference.on to judges",
        )
    if config.placement == "colocated":
        yield from _colocated_faults(config)
        return
    ranks, nodes = config.judges.ranks, config.judges.nodes
    if ranks is not None and nodes is not None:
        yield UserError(
            f"{nodes}, but judges.ranks is {ranks} already", where="judges.nodes", remedy="leave one of the two out"
        )
    names = models_on(config, "judges")
    if ranks is None and nodes is None and names:
        yield UserError(
            f"the {names[0]} is on judges, which have no ranks",
            where="judges.ranks",
            remedy="set it, such as to 1, or judges.nodes",
        )
    if (ranks or nodes) and not names:
        yield UserError(
            f"{ranks or nodes}, but no model is on judges{_absent(config)}",
            where=judges_key(config),
            remedy=f"leave it out, or set {_keys(config)} to judges",
        )


def _places(config: RunConfig) -> dict[str, str]:
    """Ranks of each model, by its key."""
    found: dict[str, str] = {"reference.on": config.reference.on, "critic.on": config.critic.on}
    if config.reward_model is not None:
        found[f"{config.reward_model_key}.on"] = config.reward_model.on
    return found


def _colocated_faults(config: RunConfig) -> Iterator[UserError]:
    keys: dict[str, object] = {key: on for key, on in _places(config).items() if on != "trainers"}
    keys |= {f"judges.{key}": value for key, value in config.judges.model_dump().items() if value is not None}
    for key, value in keys.items():
        yield UserError(
            f"{value}, but with placement colocated every rank has every model",
            where=key,
            remedy="leave it out, or set placement to separate",
        )


def _absent(config: RunConfig) -> str:
    """Reason for which a model that is configured to be there is not."""
    if config.reference.on == "judges":
        return ": without a KL term (algorithm.kl.coefficient 0) there is no reference model"
    return ""


def _keys(config: RunConfig) -> str:
    """Keys that put a model of this run on judges."""
    keys = ["reference.on"] if config.algorithm.kl.coefficient > 0 else []
    if config.algorithm.name in WITH_CRITIC or ":" in config.algorithm.name:
        keys.append("critic.on")
    if config.reward_model is not None:
        keys.append(f"{config.reward_model_key}.on")
    return " or ".join(keys or ["reference.on (with a KL term)"])


@contextmanager
def naming_judges(config: RunConfig) -> Iterator[None]:
    """Context in which errors of layouts name the ranks of judges instead of all."""
    try:
        yield
    except UserError as error:
        if JOB_RANKS not in error.message:
            raise
        message = error.message.replace(JOB_RANKS, f"ranks of judges ({judges_key(config)})")
        raise UserError(message, where=error.where, remedy=error.remedy) from None


def judge_parallels(config: RunConfig) -> dict[str, ParallelSection]:
    """Configured layouts of the models on judges, by name."""
    return {name: _SETTINGS[name](config).parallel for name in models_on(config, "judges")}


def judge_layouts(config: RunConfig) -> dict[str, ParallelLayout]:
    """Layouts of the models on judges, by name. Their layouts have been checked."""
    ranks = judge_ranks(config)
    return {name: make_layout(parallel, ranks) for name, parallel in judge_parallels(config).items() if ranks}


def check_reference(config: RunConfig, shape: ModelDescription | None) -> None:
    """Refuses a layout of a reference model on judges that does not fit their ranks or the model (if known)."""
    if "reference" not in models_on(config, "judges") or not judge_ranks(config):
        return
    try:
        with naming_judges(config):
            model_layout(backend_for(config, shape), reference_settings(config).parallel, judge_ranks(config), shape)
    except UserError as error:
        where, remedy = error.where.replace("actor.", "reference."), error.remedy.replace("actor.", "reference.")
        raise UserError(f"the reference: {error.message}", where=where, remedy=remedy) from None


def check_judges_work(config: RunConfig) -> None:
    """Refuses judges of which some get no sample of a minibatch. Their layouts have been checked."""
    train = config.train
    least = train.prompts_per_step * config.rollout.samples_per_prompt // train.minibatches
    for name, layout in judge_layouts(config).items():
        if name == "reward model" or layout.dp <= least:  # blank conversations fill the gaps of a reward model
            continue
        unit = config.resources.ranks_per_node if config.judges.nodes else 1
        most = least * (layout.world_size // layout.dp) // unit
        fewer = f"use at most {most}, or " if most else ""
        raise UserError(
            f"minibatches of {least} samples cannot feed {layout.dp} data-parallel ranks of the {name}",
            where=judges_key(config),
            remedy=f"{fewer}lower train.minibatches, or raise train.prompts_per_step",
        )
