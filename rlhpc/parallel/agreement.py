"""Agreement of all ranks: on software and config at startup, and on an error of one of them."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

import rlhpc
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo
from rlhpc.core.storage import StorageError, patiently
from rlhpc.parallel.board import Board
from rlhpc.parallel.groups import job_store, joined
from rlhpc.parallel.store import timeout_seconds

_PACKAGES = ("torch", "megatron-core", "vllm", "transformers")

UNKNOWN = "unknown"  # fact of a rank that cannot tell: it differs from none


_times: Counter[tuple[str, str]] = Counter()  # that roles have compared facts of these names, by the trainers' start

Facts = Mapping[str, str]
T = TypeVar("T")


def facts_of(files: Sequence[Path]) -> dict[str, str]:
    """Facts that must be equal on all ranks: versions, rlhpc's own source, and the contents of ``files``."""
    source = Path(rlhpc.__file__).parent
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "rlhpc's source": _digest(sorted(source.rglob("*.py"))),
        **{str(file): _digest([file]) for file in files},
    }


def check_agreement(info: RankInfo, facts: Facts) -> None:
    """Raises UserError on every rank if the facts differ. Collective over the ranks of this one's world."""
    _refuse(disagreement(_of_this_role(info, facts), info.first))


def check_job_agreement(info: RankInfo, facts: Facts, beginning: range | None = None) -> None:
    """Compares the facts of all of the job's ranks, those of other roles too. The names of the facts must be equal.

    ``beginning``: the job's ranks that begin together, if others join later: these compare themselves with them.
    """
    own = _of_this_role(info, facts)
    if info.job_size == info.world_size:
        _refuse(disagreement(own))
    else:
        _refuse(disagreement(_of_all_roles(info, own, beginning or range(info.job_size))))


def _refuse(difference: str | None) -> None:
    if difference is not None:
        raise UserError(
            difference,
            where="ranks",
            remedy="use the same environment on all nodes, and start the run from the same place",
        )


def _of_this_role(info: RankInfo, facts: Facts) -> list[tuple[str, Facts]]:
    """Everyone's node and facts, by rank in this world."""
    everyone: list[tuple[str, Facts]] = [("", {})] * info.world_size
    dist.all_gather_object(everyone, (info.node, facts))
    return everyone


def _of_all_roles(info: RankInfo, own: Sequence[tuple[str, Facts]], beginning: range) -> list[tuple[str, Facts]]:
    """Everyone's facts, by rank in the job: the first rank of each role posts its role's, and reads the others'. Those
    of ranks that are not there are unknown."""
    found: list[list[tuple[str, Facts]]] = [[]]
    if info.rank == 0:
        known = joined()
        start, names = known.trainers.prefix if known is not None else "", ", ".join(own[0][1])
        _times[start, names] += 1
        board = Board(job_store(), f"agreement {_times[start, names]} on {names}")
        board.post(str(info.first), own)
        while len(found[0]) < len(beginning):
            # The next role begins where the last one ends.
            found[0] += board.wait_for(str(len(found[0])), timeout_seconds(), "waiting for the other role")
        if info.first not in beginning:
            unknown = ("", dict.fromkeys(own[0][1], UNKNOWN))
            found[0] += [unknown] * (info.first - len(beginning)) + [*own]
    dist.broadcast_object_list(found, src=0)
    return [(node, facts) for node, facts in found[0]]


def disagreement(everyone: Sequence[tuple[str, Facts]], first: int = 0) -> str | None:
    """First difference between the facts of ranks, given as (node, facts), and its ranks; None if all agree. ``first``:
    the first of them in the job."""
    for name in everyone[0][1]:
        values = [facts.get(name, "none") for _, facts in everyone]
        usual, _ = Counter(value for value in values if value != UNKNOWN).most_common(1)[0]
        others = [rank for rank, value in enumerate(values) if value not in (usual, UNKNOWN)]
        if others:
            ranks = ", ".join(f"{first + rank} on {everyone[rank][0]}" for rank in others[:4])
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            return f"rank {ranks}{more} has {name} {values[others[0]]}, the others have {usual}"
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(patiently(functools.partial(_content, file), file))
    return digest.hexdigest()[:12]


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b"missing"


def together(action: Callable[[], T]) -> T:
    """Result of ``action``, which every rank calls; raises an OSError of one of them on all. Collective.

    Collectives inside ``action`` must precede all that can fail on a single rank.
    """
    result, failure = None, None
    try:
        result = action()
    except OSError as error:
        failure = error
    raise_together(failure)
    return cast(T, result)


def on_first_rank(action: Callable[[], object]) -> None:
    """Calls ``action`` on rank 0 while the others wait; raises its OSError on all. Collective."""
    together(lambda: action() if dist.get_rank() == 0 else None)


def raise_together(error: OSError | None) -> None:
    """Raises an error of one rank on every rank, if there is any. Collective over all ranks.

    A rank with an error of its own raises that one; the others raise that of the first rank with an error, and name it.
    """
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not int(failed):
        return
    met: list[tuple | None] = [None] * dist.get_world_size()
    words = () if error is None else (isinstance(error, StorageError), error.errno, error.strerror or str(error))
    dist.all_gather_object(met, None if error is None else (*words, error.filename))
    if error is not None:
        raise error
    rank, (is_storage, number, text, file) = next((rank, found) for rank, found in enumerate(met) if found is not None)
    raise (StorageError if is_storage else OSError)(number, f"{text} (on rank {rank})", file)
