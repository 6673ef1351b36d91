"""Do all ranks run the same program on the same config? Asked once, when they have joined."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch.distributed as dist

import rlhpc
from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo

_PACKAGES = ("torch", "megatron-core", "vllm", "transformers")

Facts = Mapping[str, str]


def facts_of(files: Sequence[Path]) -> dict[str, str]:
    """What must be alike on this rank: versions, rlhpc's own source, and the contents of ``files``."""
    source = Path(rlhpc.__file__).parent
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "rlhpc's source": _digest(sorted(source.rglob("*.py"))),
        **{str(file): _digest([file]) for file in files},
    }


def check_agreement(info: RankInfo, facts: Facts) -> None:
    """Raise a UserError on every rank if one differs. Collective over all ranks."""
    everyone: list[tuple[str, Facts]] = [("", {})] * info.world_size
    dist.all_gather_object(everyone, (info.node, facts))
    told = disagreement(everyone)
    if told is not None:
        raise UserError(
            told, where="ranks", remedy="install one environment for all nodes, and start the run from one place"
        )


def disagreement(everyone: Sequence[tuple[str, Facts]]) -> str | None:
    """(node, facts) of each rank to what differs first, and on which ranks; None when all agree."""
    for name in everyone[0][1]:
        values = [facts.get(name, "nothing") for _, facts in everyone]
        usual, _ = Counter(values).most_common(1)[0]
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            ranks = ", ".join(f"{rank} on {everyone[rank][0]}" for rank in others[:4])
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            return f"rank {ranks}{more} has {name} {values[others[0]]}, the others have {usual}"
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "nothing"


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"missing")
    return digest.hexdigest()[:12]
