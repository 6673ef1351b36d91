"""Checks which ranks train and which generate, and the keys that only one of the placements has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import lcm
from typing import NoReturn

from rlhpc.config.rollout import AsynchronySection, DynamicSamplingSection, replayed_groups
from rlhpc.config.schema import RunConfig
from rlhpc.config.section import Section
from rlhpc.core.errors import Faults, UserError
from rlhpc.plan.checks.generation_order import order_faults
from rlhpc.plan.checks.judges import judge_faults, judges_key
from rlhpc.plan.checks.lost_engines import check_lost_engines, lost_engine_faults
from rlhpc.plan.checks.rollout_jobs import rollout_job_faults
from rlhpc.sharding.layout import JOB_RANKS, divisors
from rlhpc.sharding.placement import Placement, judge_ranks, placement_of

_LEAST_SECONDS = 1e-9  # virtual time is in whole nanoseconds
_TRIED = 4096  # numbers of ranks above and below the configured one that a remedy is looked for in


def separates(config: RunConfig) -> bool:
    """True if some ranks only generate: in a run with RL steps and placement separate or lend."""
    return config.placement != "colocated" and config.train.steps > 0


def new_groups(config: RunConfig, prompts: int | None = None) -> int:
    """Number of a step's groups that are generated for it, all but replayed ones, of ``prompts`` or as configured."""
    groups, replay = prompts or config.train.prompts_per_step, config.train.replay
    return groups if replay is None else groups - replayed_groups(groups, replay.fraction, replay.capacity)


def check_placement(config: RunConfig) -> None:
    """Refuses keys of the other placement, and settings that no split of the ranks makes work."""
    if config.placement == "colocated":
        judges = judge_faults(config) if config.train.steps else ()
        lost = chain(lost_engine_faults(config), rollout_job_faults(config))
        Faults(chain(_colocated_faults(config), judges, lost)).raise_all()
    elif config.train.steps:
        faults = (_split_faults, judge_faults, _separate_faults, _lend_faults, _schedule_faults)
        elastic = (lost_engine_faults, rollout_job_faults)
        Faults(chain.from_iterable(find(config) for find in (*faults, *elastic))).raise_all()


def _colocated_faults(config: RunConfig) -> Iterator[UserError]:
    for key in ("ranks", "nodes"):
        if (value := getattr(config.rollout, key)) is not None:
            yield UserError(
                f"{value}, but with placement colocated every rank generates",
                where=f"rollout.{key}",
                remedy="leave it out, or set placement to separate",
            )
    if config.reshard.delta != "off":
        yield UserError(
            f"{config.reshard.delta}, but only engines on ranks of their own have a base to receive deltas to",
            where="reshard.delta",
            remedy="leave it out, or set placement to separate",
        )
    for key, value in _changed(config.asynchrony, AsynchronySection(), "asynchrony"):
        yield UserError(
            f"{value}, but placement colocated generates and trains in turn",
            where=key,
            remedy="leave it out, or set placement to separate",
        )


def _changed(section: Section, usual: Section, name: str) -> Iterator[tuple[str, object]]:
    """Keys of a section with another value than the default, and the values."""
    for field in type(section).model_fields:
        value, default = getattr(section, field), getattr(usual, field)
        if isinstance(value, Section):
            yield from _changed(value, default, f"{name}.{field}")
        elif value != default:
            yield f"{name}.{field}", value


def _split_faults(config: RunConfig) -> Iterator[UserError]:
    ranks, nodes = config.rollout.ranks, config.rollout.nodes
    if ranks is None and nodes is None:
        nodes_too = f", or rollout.nodes {config.slurm.most_nodes // 2}" if config.slurm.most_nodes > 1 else ""
        yield UserError(
            f"placement {config.placement} needs the number of ranks that {_only(config)}generate",
            where="rollout.ranks",
            remedy=f"set it, such as to {max(1, config.world_size // 2)}{nodes_too}",
        )
    if ranks is not None and nodes is not None:
        yield UserError(
            f"{nodes}, but rollout.ranks is {ranks} already",
            where="rollout.nodes",
            remedy="leave one of the two out",
        )


def _separate_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys of generation in turn with training."""
    if config.reshard.method != "direct":
        yield UserError(
            f"{config.reshard.method} passes whole tensors inside a rank, and engines have ranks of their own",
            where="reshard.method",
            remedy="set it to direct",
        )
    if config.reshard.share_weights:
        yield UserError(
            "engines on ranks of their own cannot share the trainers' memory",
            where="reshard.share_weights",
            remedy="set it to false",
        )
    if config.reshard.delta != "off" and config.model.dtype != "bfloat16":
        yield UserError(
            f"{config.reshard.delta}, but an update changes all elements of a model in {config.model.dtype}",
            where="reshard.delta",
            remedy="set it to off, or model.dtype to bfloat16",
        )
    section, usual = config.train.dynamic_sampling, DynamicSamplingSection()
    for key in ("oversample", "check_every", "max_staleness"):
        if section is not None and (value := getattr(section, key)) != getattr(usual, key):
            yield UserError(
                f"{value}, but with placement {config.placement} asynchrony.max_staleness sets how far engines "
                "generate ahead",
                where=f"train.dynamic_sampling.{key}",
                remedy="leave it out, and set asynchrony.max_staleness",
            )


def _lend_faults(config: RunConfig) -> Iterator[UserError]:
    """Keys of generation on the trainers' ranks."""
    in_flight, lend = config.asynchrony.in_flight, config.asynchrony.costs.lend_seconds
    if config.placement == "lend" and in_flight != "recompute":
        yield UserError(
            f"{in_flight}, but requests that trainers' ranks return are recomputed (placement lend)",
            where="asynchrony.in_flight",
            remedy="set it to recompute, or placement to separate",
        )
    if config.placement == "separate" and lend is not None:
        yield UserError(
            f"{lend:g}, but with placement separate the trainers' ranks do not generate",
            where="asynchrony.costs.lend_seconds",
            remedy="leave it out, or set placement to lend",
        )


def _only(config: RunConfig) -> str:
    return "only " if config.placement == "lend" else ""


def _schedule_faults(config: RunConfig) -> Iterator[UserError]:
    """Settings of the schedule that contradict each other."""
    section, steps, replay = config.asynchrony, config.train.steps, config.train.replay
    if section.max_staleness > max(1, steps - 1):
        yield UserError(
            f"{section.max_staleness} is never reached in {steps} steps (train.steps)",
            where="asynchrony.max_staleness",
            remedy=f"use at most {max(1, steps - 1)}",
        )
    costs = section.costs
    if all(value is not None and value < _LEAST_SECONDS for value in (costs.step_seconds, costs.sequence_seconds)):
        yield UserError(
            f"{costs.step_seconds:g}, and asynchrony.costs.sequence_seconds is {costs.sequence_seconds:g}: virtual "
            "time would stand still",
            where="asynchrony.costs.step_seconds",
            remedy=f"set one of them to {_LEAST_SECONDS:g} or more, or leave both out",
        )
    if costs.train_seconds is not None and costs.train_seconds < _LEAST_SECONDS:
        yield UserError(
            f"{costs.train_seconds:g}: virtual time would stand still",
            where="asynchrony.costs.train_seconds",
            remedy=f"set it to {_LEAST_SECONDS:g} or more, or leave it out",
        )
    yield from order_faults(config)
    if replay is None:
        return
    if config.algorithm.name == "remax":
        yield UserError(
            f"greedy responses to the prompts of replayed groups are not generated with placement {config.placement}",
            where="train.replay",
            remedy="leave it out, or set placement to colocated",
        )
    groups = config.train.prompts_per_step
    if new_groups(config) == groups:
        smallest = f"use at least {0.51 / groups:.2g}" if groups > 1 else "use train.prompts_per_step 2 or more"
        yield UserError(
            f"{replay.fraction:g} of {groups} groups a step (train.prompts_per_step) is none",
            where="train.replay.fraction",
            remedy=smallest,
        )
    if replay.max_staleness <= section.max_staleness:
        yield UserError(
            f"{replay.max_staleness}, but groups may be {section.max_staleness} versions old when they are new "
            "(asynchrony.max_staleness)",
            where="train.replay.max_staleness",
            remedy=f"use at least {section.max_staleness + 1}",
        )


@dataclass(frozen=True)
class _Split:
    """A number of ranks that generate, in units of the key that sets it."""

    key: str
    asked: int
    unit: int  # ranks
    world_size: int
    ranks_per_node: int
    judges: int = 0  # ranks of theirs

    @property
    def ranks(self) -> int:
        return self.asked * self.unit

    @property
    def of_all(self) -> str:
        """The asked number beside that of the job."""
        name = "nodes" if self.key == "rollout.nodes" else "ranks"
        return f"{self.asked} of the job's {self.world_size // self.unit} {name}"


def check_roles(config: RunConfig, world_size: int) -> Placement:
    """Returns the roles of a job's ranks. Raises UserError if one has no ranks, or engines do not fit theirs."""
    if not separates(config):
        return placement_of(config, world_size)
    Faults(_split_faults(config)).raise_all()
    nodes, per_node = config.rollout.nodes, config.resources.ranks_per_node
    key, asked, unit = ("rollout.nodes", nodes, per_node) if nodes else ("rollout.ranks", config.rollout.ranks or 0, 1)
    split = _Split(key, asked, unit, world_size, per_node, judge_ranks(config))
    if world_size < 2:
        raise UserError(
            "a job of 1 rank has none that trains beside one that generates",
            where="placement",
            remedy="raise resources.ranks_per_node or slurm.nodes to 2 or more, or set it to colocated",
        )
    if split.ranks >= world_size:
        raise UserError(f"{split.of_all} generate, and none trains", where=key, remedy=_nearest(config, split))
    if split.ranks + split.judges >= world_size:
        _refuse_judges(config, split)
    _check_engines(config, split)
    _check_work(config, split)
    placement = placement_of(config, world_size)
    check_lost_engines(config, placement)
    if placement.lends:
        _check_lenders(config, split, placement.trainers.size)
    return placement


def _refuse_judges(config: RunConfig, split: _Split) -> NoReturn:
    """Refuses judges that leave no rank to train, with the nearest number that does."""
    key, unit = judges_key(config), config.resources.ranks_per_node if config.judges.nodes else 1
    left, cut = split.world_size - split.ranks, _actor_ranks(config)
    most = (left - 1) // unit
    found = next((count for count in range(most, 0, -1)[:_TRIED] if not (left - count * unit) % cut), None)
    lower = f"use {found}, or " if found else ""
    raise UserError(
        f"{split.judges} ranks of judges and {split.ranks} that generate, of the job's {split.world_size}: none trains",
        where=key,
        remedy=f"{lower}raise resources.ranks_per_node or slurm.nodes",
    )


def _check_engines(config: RunConfig, split: _Split) -> None:
    """Refuses engines that leave ranks over, or that are on parts of several nodes."""
    tp = config.rollout.tp
    valid = [size for size in divisors(split.ranks) if _on_nodes(size, split.ranks, split)]
    remedy = f"use one of {valid}"
    near = _near(config, split)
    if near:
        remedy += f", or {split.key} {near}"
    if split.ranks % tp:
        raise UserError(
            f"engines of {tp} ranks do not divide the {split.ranks} ranks that generate ({split.key})",
            where="rollout.tp",
            remedy=remedy,
        )
    if not _on_nodes(tp, split.ranks, split):
        raise UserError(
            f"of {split.ranks} ranks that generate, an engine of {tp} has parts of several nodes of "
            f"{split.ranks_per_node}",
            where="rollout.tp",
            remedy=remedy,
        )


def _check_lenders(config: RunConfig, split: _Split, trainers: int) -> None:
    """Refuses engines that leave some of the ranks that train over, or that are on parts of several nodes there."""
    tp = config.rollout.tp
    if _lenders_fit(tp, trainers, split):
        return
    valid = [
        size
        for size in divisors(split.ranks)
        if _on_nodes(size, split.ranks, split) and _lenders_fit(size, trainers, split)
    ]
    near = _near(config, split)
    fault = f"of {trainers} ranks that train, an engine of {tp} has parts of several nodes of {split.ranks_per_node}"
    if trainers % tp:
        fault = f"engines of {tp} ranks do not divide the {trainers} ranks that train"
    raise UserError(
        f"{fault} (placement lend)",
        where="rollout.tp",
        remedy=f"use one of {valid}{f', or {split.key} {near}' if near else ''}, or set placement to separate",
    )


def _lenders_fit(tp: int, trainers: int, split: _Split) -> bool:
    """True if engines of ``tp`` on the first ranks of the job leave none over, and are inside a node or on whole
    ones."""
    per_node = split.ranks_per_node
    return trainers % tp == 0 and (per_node % tp == 0 or tp % per_node == 0 or trainers <= per_node)


def _on_nodes(tp: int, ranks: int, split: _Split) -> bool:
    """True if engines of ``tp`` on the last ``ranks`` of the job are each inside a node, or on whole nodes."""
    per_node = split.ranks_per_node
    if per_node % tp == 0 or tp % per_node == 0:
        return True  # the last engine ends with a node
    return ranks <= per_node


def _check_work(config: RunConfig, split: _Split) -> None:
    """Refuses more engines than groups that may be generated at once: some would never have work."""
    engines, groups, ahead = split.ranks // config.rollout.tp, new_groups(config), config.asynchrony.max_staleness + 1
    if engines <= groups * ahead:
        return
    most = groups * ahead * config.rollout.tp // split.unit
    fewer = f"use at most {most}, or " if most else ""
    raise UserError(
        f"{engines} engines, but at most {groups * ahead} groups are generated at once ({groups} a step, "
        f"asynchrony.max_staleness {ahead - 1})",
        where=split.key,
        remedy=f"{fewer}raise train.prompts_per_step to {_prompts(config, engines, ahead)}",
    )


def _prompts(config: RunConfig, engines: int, ahead: int) -> int:
    """The smallest number of prompts per step that gives every engine a group."""
    groups, replay = -(-engines // ahead), config.train.replay
    tried = range(groups, groups + (replay.capacity if replay else 0) + 1)
    return tried[bisect_left(tried, groups, key=lambda prompts: new_groups(config, prompts))]


def _nearest(config: RunConfig, split: _Split) -> str:
    """Remedy: the nearest numbers that work, or what else to change."""
    near = _near(config, split)
    if near:
        return f"use {near}"
    return "raise resources.ranks_per_node or slurm.nodes, or lower rollout.tp or actor.parallel"


def _near(config: RunConfig, split: _Split) -> str:
    """The nearest numbers below and above the configured one that both roles fit."""
    tp, cut, others = config.rollout.tp, _actor_ranks(config), split.world_size - split.judges

    def works(number: int) -> bool:
        ranks = number * split.unit
        if config.placement == "lend" and not _lenders_fit(tp, others - ranks, split):
            return False
        return not (ranks % tp or (others - ranks) % cut) and _on_nodes(tp, ranks, split)

    most = (others - 1) // split.unit
    below = range(min(split.asked - 1, most), 0, -1)[:_TRIED]
    above = range(split.asked + 1, most + 1)[:_TRIED]
    found = [next(filter(works, numbers), None) for numbers in (below, above)]
    return " or ".join(str(number) for number in found if number is not None)


def _actor_ranks(config: RunConfig) -> int:
    """The smallest number of ranks that the actor's layout divides."""
    parallel = config.actor.parallel
    copies = parallel.dp_replicate
    return lcm(copies * parallel.tp * parallel.cp * parallel.pp, parallel.etp * parallel.ep * parallel.pp)


@contextmanager
def naming_trainers(config: RunConfig) -> Iterator[None]:
    """Context in which errors of layouts name the ranks that train instead of all."""
    try:
        yield
    except UserError as error:
        if not separates(config) or JOB_RANKS not in error.message:
            raise
        key = "rollout.nodes" if config.rollout.nodes else "rollout.ranks"
        key += f" and {judges_key(config)}" if judge_ranks(config) else ""
        trainers = f"ranks that train (slurm.nodes x resources.ranks_per_node without {key})"
        message = error.message.replace(JOB_RANKS, trainers)
        raise UserError(message, where=error.where, remedy=error.remedy) from None
