"""What the cluster has, as sinfo tells it, against what a config asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhpc.config.jobs import memory_mib
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.launch.slurm.commands import ask
from rlhpc.launch.slurm.times import seconds_of

_FORMAT = "%P|%a|%l|%D|%c|%m|%f|%s|%G"


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition. ``limit``: longest time of a job in seconds, ``largest``: most nodes of one; None:
    no limit. ``gpus`` by type."""

    partition: str
    default: bool
    up: bool
    limit: int | None
    largest: int | None
    nodes: int
    cpus: int
    memory_mib: int
    features: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]

    def gpu_count(self, kind: str | None = None) -> int:
        """GPUs on each node, of one type or of all."""
        return sum(count for name, count in self.gpus if kind in (None, name))


def read_partitions() -> list[NodeGroup]:
    """Every partition's nodes, hidden ones too; empty when sinfo does not say."""
    answer = ask("sinfo", "-a", "-h", "-o", _FORMAT)
    return parse_partitions(answer.out) if answer.code == 0 else []


def parse_partitions(text: str) -> list[NodeGroup]:
    """The lines of ``sinfo -h -o`` with this module's format; a line that is not understood is left out."""
    groups = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 8)]
        numbers = [field.rstrip("+") for field in fields[3:6]]
        if len(fields) == 9 and all(number.isdecimal() for number in numbers):
            name, up, limit = fields[:3]
            nodes, cpus, memory = map(int, numbers)
            features = () if fields[6] == "(null)" else tuple(fields[6].split(","))
            default, longest = name.endswith("*"), seconds_of(limit)
            largest = fields[7].rpartition("-")[2]
            groups.append(
                NodeGroup(
                    name.rstrip("*"),
                    default,
                    up == "up",
                    longest,
                    int(largest) if largest.isdecimal() else None,
                    nodes,
                    cpus,
                    memory,
                    features,
                    _gpus(fields[8]),
                )
            )
    return groups


def check_partitions(config: RunConfig, groups: Sequence[NodeGroup], gpus_per_node: int) -> None:
    """Refuse what no node of the partition can give, naming the key. Says nothing where sinfo said nothing."""
    slurm = config.slurm
    where = "the cluster"
    if slurm.partition is not None and groups:
        names = {group.partition for group in groups}
        for name in slurm.partition.split(","):
            if name not in names:
                raise UserError(f"no partition {name!r}", where="slurm.partition", remedy=did_you_mean(name, names))
        groups = [group for group in groups if group.partition in slurm.partition.split(",")]
        where = f"partition {slurm.partition}"
    if not groups:
        return
    groups = _check_gpus(groups, gpus_per_node, slurm.gpu_type, where)
    if slurm.cpus_per_rank is not None:
        cpus = slurm.cpus_per_rank * config.resources.ranks_per_node
        wrong = f"{cpus} CPUs on each node ({slurm.cpus_per_rank} for each of {config.resources.ranks_per_node} ranks)"
        groups = _with_enough(groups, lambda group: group.cpus, cpus, wrong, where, "slurm.cpus_per_rank", "CPUs")
    if slurm.memory is not None:
        least = memory_mib(slurm.memory)
        wrong = f"{slurm.memory} of memory on each node"
        groups = _with_enough(groups, lambda group: group.memory_mib, least, wrong, where, "slurm.memory", "MiB")
    _check_features(groups, slurm.constraint, where)
    _check_nodes(groups, slurm.least_nodes, where)
    if slurm.time is not None and slurm.qos is None:  # a QoS may allow more than the partition
        _check_time(groups, slurm.time, where)


def most_nodes(groups: Sequence[NodeGroup]) -> int:
    """Nodes that one job can have in the best of the partitions."""
    by_partition: dict[str, int] = {}
    for group in groups:
        together = by_partition.get(group.partition, 0) + group.nodes
        by_partition[group.partition] = together if group.largest is None else min(together, group.largest)
    return max(by_partition.values(), default=0)


def _check_gpus(groups: Sequence[NodeGroup], count: int, kind: str | None, where: str) -> Sequence[NodeGroup]:
    if not count:
        return groups
    if not any(group.gpus for group in groups):
        raise UserError(
            f"no node of {where} has GPUs, {count} are asked for on each (by default one for each rank)",
            where="slurm.gpus_per_node",
            remedy="name another slurm.partition, or set it to 0 to compute on CPUs",
        )
    if kind is not None:
        kinds = {name for group in groups for name, _ in group.gpus if name}
        if kinds and kind not in kinds:
            raise UserError(f"no {kind!r} GPUs in {where}", where="slurm.gpu_type", remedy=did_you_mean(kind, kinds))
        kind = kind if kinds else None
    wrong = f"{count} GPUs on each node"
    return _with_enough(groups, lambda group: group.gpu_count(kind), count, wrong, where, "slurm.gpus_per_node", "GPUs")


def _with_enough(
    groups: Sequence[NodeGroup],
    have: Callable[[NodeGroup], int],
    least: float,
    wrong: str,
    where: str,
    key: str,
    unit: str,
) -> list[NodeGroup]:
    enough = [group for group in groups if have(group) >= least]
    if not enough:
        most = max(have(group) for group in groups)
        raise UserError(f"{wrong}, but nodes of {where} have at most {most} {unit}", where=key, remedy="lower it")
    return enough


def _check_features(groups: Sequence[NodeGroup], constraint: str | None, where: str) -> None:
    names = {feature for group in groups for feature in group.features}
    if constraint is not None and re.fullmatch(r"[\w.-]+", constraint) and constraint not in names:
        remedy = did_you_mean(constraint, names) if names else "leave it out: no node has features"
        raise UserError(f"no node of {where} has the feature {constraint!r}", where="slurm.constraint", remedy=remedy)


def _check_nodes(groups: Sequence[NodeGroup], least: int, where: str) -> None:
    most = most_nodes(groups)
    if least > most:
        raise UserError(
            f"{least} nodes, but {where} has {most} for one job that fit the rest of what is asked for",
            where="slurm.nodes",
            remedy=f"use at most {most}",
        )


def _check_time(groups: Sequence[NodeGroup], time: str | int, where: str) -> None:
    limits = [group.limit for group in groups]
    asked, known = seconds_of(time), [limit for limit in limits if limit is not None]
    if asked is not None and len(known) == len(limits) and asked > max(known):
        raise UserError(
            f"{time} is longer than {where} allows",
            where="slurm.time",
            remedy=f"use at most {in_slurm_words(max(known))}; a longer run saves in time and is requeued by itself",
        )


def in_slurm_words(seconds: int) -> str:
    """D-HH:MM:SS or HH:MM:SS, as slurm.time takes it."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def _gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """``gpu:h100:4(S:0-1),gpu:2,nvme:1`` gives (("h100", 4), ("", 2))."""
    found = re.findall(r"(?:^|,)gpu(?::([^:,(]*[^:,(\d][^:,(]*))?(?::(\d+))?", gres)
    return tuple((kind, int(count or 1)) for kind, count in found)
