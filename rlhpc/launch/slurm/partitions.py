"""Compares the resources that a config requests with the partitions and nodes that sinfo reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhpc.config.jobs import memory_mib
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.launch.slurm.commands import ask, seconds_of

_FORMAT = "%P|%a|%l|%D|%c|%m|%f|%s|%G"


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition. ``limit``: maximum time of a job in seconds; ``largest``: maximum nodes of a job;
    None: no limit. ``gpus`` by type."""

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


def read_partitions(cluster: str | None = None) -> list[NodeGroup]:
    """Nodes of every partition, hidden ones too; empty if sinfo fails. ``cluster``: default: the login node's."""
    answer = ask("sinfo", "-a", "-h", "-o", _FORMAT, cluster=cluster)
    return parse_partitions(answer.out) if answer.code == 0 else []


def parse_partitions(text: str) -> list[NodeGroup]:
    """Node groups from the output of ``sinfo -h -o`` with this module's format, without malformed lines."""
    groups = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 8)]
        numbers = [field.rstrip("+") for field in fields[3:6]]
        if len(fields) == 9 and all(number.isdecimal() for number in numbers):
            name, up, limit = fields[:3]
            nodes, cpus, memory = map(int, numbers)
            features = () if fields[6] == "(null)" else tuple(fields[6].split(","))
            largest = fields[7].rpartition("-")[2]
            most = int(largest) if largest.isdecimal() else None
            place = name.rstrip("*"), name.endswith("*"), up == "up", seconds_of(limit), most
            groups.append(NodeGroup(*place, nodes, cpus, memory, features, _gpus(fields[8])))
    return groups


def check_partitions(config: RunConfig, groups: Sequence[NodeGroup], gpus_per_node: int) -> None:
    """Raises UserError, with the key, for a request that no node of the partition meets. Passes without ``groups``."""
    slurm, known = config.slurm, groups
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
    requests: list[tuple[str, float, str, str, Callable[[NodeGroup], int]]] = []  # key, minimum, unit, text, of a node
    if gpus_per_node and slurm.gpu_request != "none":
        _require_gpus(groups, gpus_per_node, where, [group.partition for group in known if group.gpus])
        kind, text = _known_kind(groups, slurm.gpu_type, where), f"{gpus_per_node} GPUs on each node"
        requests.append(("slurm.gpus_per_node", gpus_per_node, "GPUs", text, lambda group: group.gpu_count(kind)))
    if slurm.cpus_per_rank is not None:
        cpus = slurm.cpus_per_rank * config.resources.ranks_per_node
        text = f"{cpus} CPUs on each node ({slurm.cpus_per_rank} for each of {config.resources.ranks_per_node} ranks)"
        requests.append(("slurm.cpus_per_rank", cpus, "CPUs", text, lambda group: group.cpus))
    if slurm.memory is not None:
        text = f"{slurm.memory} of memory on each node"
        requests.append(("slurm.memory", memory_mib(slurm.memory), "MiB", text, lambda group: group.memory_mib))
    for key, least, unit, text, has in requests:
        enough = [group for group in groups if has(group) >= least]
        if not enough:
            message = f"{text}, but nodes of {where} have at most {max(map(has, groups))} {unit}"
            raise UserError(message, where=key, remedy="lower it")
        groups = enough
    _check_features(groups, slurm.constraint, where)
    _check_nodes(groups, slurm.least_nodes, where)
    if slurm.time is not None and slurm.qos is None:  # a QoS may allow more than the partition
        _check_time(groups, slurm.time, where)


def most_nodes(groups: Sequence[NodeGroup]) -> int:
    """Maximum nodes of one job in any one of the partitions."""
    by_partition: dict[str, int] = {}
    for group in groups:
        together = by_partition.get(group.partition, 0) + group.nodes
        by_partition[group.partition] = together if group.largest is None else min(together, group.largest)
    return max(by_partition.values(), default=0)


def _require_gpus(groups: Sequence[NodeGroup], count: int, where: str, partitions: Sequence[str]) -> None:
    """Raises UserError if Slurm manages no GPUs of these nodes. ``partitions``: where it does."""
    if any(group.gpus for group in groups):
        return
    others = ", ".join(dict.fromkeys(partitions))
    elsewhere = f"name a slurm.partition that has them ({others}), or, " if others else ""
    raise UserError(
        f"no node of {where} has GPUs in Slurm (gres), but {count} per node are requested (default: one per rank)",
        where="slurm.gpus_per_node",
        remedy=f"{elsewhere}if its nodes have GPUs that Slurm does not manage, request whole nodes without "
        "--gpus-per-node: slurm.gpu_request=none and slurm.exclusive=true",
    )


def _known_kind(groups: Sequence[NodeGroup], kind: str | None, where: str) -> str | None:
    """The type of GPUs to count; None where Slurm knows no types. Raises UserError for a type that no node has."""
    kinds = {name for group in groups for name, _ in group.gpus if name}
    if kind is not None and kinds and kind not in kinds:
        raise UserError(f"no {kind!r} GPUs in {where}", where="slurm.gpu_type", remedy=did_you_mean(kind, kinds))
    return kind if kinds else None


def _check_features(groups: Sequence[NodeGroup], constraint: str | None, where: str) -> None:
    names = {feature for group in groups for feature in group.features}
    if constraint is not None and re.fullmatch(r"[\w.-]+", constraint) and constraint not in names:
        remedy = did_you_mean(constraint, names) if names else "leave it out: no node has features"
        raise UserError(f"no node of {where} has the feature {constraint!r}", where="slurm.constraint", remedy=remedy)


def _check_nodes(groups: Sequence[NodeGroup], least: int, where: str) -> None:
    most = most_nodes(groups)
    if least > most:
        raise UserError(
            f"{least} nodes, but {where} has only {most} for one job that meet the other requests",
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
            remedy=f"use at most {in_slurm_words(max(known))}; longer runs checkpoint before it and are requeued",
        )


def in_slurm_words(seconds: int) -> str:
    """D-HH:MM:SS or HH:MM:SS, as slurm.time takes it."""
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def _gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """``gpu:h100:4(S:0-1),gpu:2,nvme:1`` gives (("h100", 4), ("", 2)); types of MIG instances such as 1g.5gb too."""
    found = []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = re.sub(r"^gres[/:]", "", item.strip()).split(":")
        if name == "gpu":
            kinds = [word for word in words if word and not word.isdecimal() and word != "no_consume"]
            count = next((int(word) for word in reversed(words) if word.isdecimal()), 1)
            found.append((kinds[0] if kinds else "", count))
    return tuple(found)
