"""Cores of a rank whose job step shares its node with others of the job.

Slurm may give such steps the same cores, so they are not bound by it; each rank takes its own. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlhpc.core import env

_TOPOLOGY = Path("/sys/devices/system/cpu")


def take_own_cores(local_rank: int, ranks_here: int, environ: Mapping[str, str] = os.environ) -> None:
    """Binds this process, and all that it starts, to its share of the cores that the job has on this node; does nothing
    where the launcher did not ask for it, or where there are fewer cores than ranks."""
    if env.RLHPC_OWN_CORES not in environ:
        return
    mine = own_share(cores_of(os.sched_getaffinity(0)), local_rank, ranks_here)
    if mine:
        with suppress(OSError):  # slower, not wrong
            os.sched_setaffinity(0, mine)


def cores_of(cpus: Iterable[int], folder: Path = _TOPOLOGY) -> list[list[int]]:
    """The hardware threads of each core among ``cpus``, cores of a socket in a row."""
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        place = folder / f"cpu{cpu}" / "topology"
        try:
            key = (int((place / "physical_package_id").read_text()), int((place / "core_id").read_text()))
        except (OSError, ValueError):
            key = (0, cpu)
        found.setdefault(key, []).append(cpu)
    return [found[key] for key in sorted(found)]


def own_share(cores: Sequence[Sequence[int]], local_rank: int, ranks_here: int) -> set[int]:
    """Hardware threads of a rank: ranks get equally many whole cores, in their order; the rest has none. Empty if there
    are fewer cores than ranks."""
    count = len(cores) // ranks_here
    return {cpu for core in cores[local_rank * count : (local_rank + 1) * count] for cpu in core}
