"""Gathers numbers of all ranks, such as their memory, in one collective per step.

A contributor returns numbers by name. A rank that lacks a name contributes NaN, and has no part in its metrics. Names
that come without reductions end in their own one, as ``gpu/power_watts_max``.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.core.process import take_observing_seconds
from rlhpc.core.shown import ShownOnly
from rlhpc.parallel.waits import measured_calls, overhead

Contributor = Callable[[], Mapping[str, float]]

_MOST_NAMES = 4096
_KINDS = ("mean", "max", "min", "sum")
_GIB = 1024**3
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OBSERVERS, _RANK = "cpu of observers", "cpu of the rank"


@dataclass(frozen=True)
class Gathered:
    """Numbers of a step: a row of ``table`` for each rank, a column for each of ``names``. ``reductions``: how metrics
    follow from a name, of ``mean``, ``max``, ``min`` and ``sum``."""

    names: tuple[str, ...]
    table: Any
    reductions: Mapping[str, tuple[str, ...]]

    @property
    def world_size(self) -> int:
        return len(self.table)

    def column(self, name: str) -> list[float]:
        """The number of each rank, NaN where it has none."""
        return self._columns[name] if name in self._columns else [math.nan] * self.world_size

    @functools.cached_property
    def _columns(self) -> dict[str, list[float]]:
        return dict(zip(self.names, self.table.T.tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """``NAME_REDUCTION`` of every name, and ``NAME_max_rank`` and ``NAME_min_rank``, the rank that has it."""
        found: dict[str, float] = {}
        for name in self.names:
            base, kinds = name, self.reductions.get(name, ())
            if name not in self.reductions:
                base, _, kind = name.rpartition("_")
                kinds = (kind,) if kind in _KINDS else ()
            if kinds:
                found |= {f"{base}_{key}": value for key, value in _reduced(self.column(name), kinds).items()}
        return found


class RankNumbers:
    """Contributors of this rank. All ranks add the same ones; the names that they return may differ."""

    def __init__(self) -> None:
        self._contributors: list[tuple[Contributor, tuple[str, ...] | None, ShownOnly]] = []
        self._names: tuple[str, ...] = ()  # equal on every rank
        self._reductions: dict[str, tuple[str, ...]] = {}

    def add(self, what: str, contributor: Contributor, reductions: Iterable[str] | None = ("mean", "max")) -> None:
        """Adds a contributor. Its failure is reported once, as one of ``what``, and never ends the run. Without
        ``reductions`` its names end in them."""
        kinds = None if reductions is None else tuple(reductions)
        self._contributors.append((contributor, kinds, ShownOnly(what)))

    def gather(self) -> Gathered:
        """Numbers of all ranks on every rank. Collective: a few numbers in CPU memory; twice if names are new."""
        own: dict[str, float] = {}
        for contributor, kinds, guard in self._contributors:
            with guard:
                found = contributor()
                own |= found
                self._reductions |= dict.fromkeys(found, kinds) if kinds is not None else {}
        while True:
            new = len(self._names) < _MOST_NAMES and not own.keys() <= set(self._names)
            row = np.array([float(new), *(own.get(name, math.nan) for name in self._names)])
            rows = np.empty((dist.get_world_size(), len(row)))
            dist.all_gather([*torch.from_numpy(rows)], torch.from_numpy(row))
            if not rows[:, 0].any():
                return Gathered(self._names, rows[:, 1:], self._reductions)
            self._names = _all_names({*self._names, *own})


def _all_names(own: set[str]) -> tuple[str, ...]:
    """Names of all ranks. Collective."""
    everyone: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, tuple(own))
    return tuple(sorted({name for names in everyone for name in names})[:_MOST_NAMES])


def _reduced(values: list[float], kinds: Iterable[str]) -> dict[str, float]:
    """Reductions over the ranks that have a number; none if no rank has."""
    known = {rank: value for rank, value in enumerate(values) if not math.isnan(value)}
    if not known:
        return {}
    found: dict[str, float] = {}
    for kind in kinds:
        if kind == "mean":
            found["mean"] = sum(known.values()) / len(known)
        elif kind == "sum":
            found["sum"] = sum(known.values())
        elif kind == "min":
            rank = min(known, key=lambda rank: known[rank])
            found |= {"min": known[rank], "min_rank": float(rank)}
        else:
            rank = max(known, key=lambda rank: known[rank])
            found |= {"max": known[rank], "max_rank": float(rank)}
    return found


def memory_in_use() -> dict[str, float]:
    """Memory of this process in GiB, of its GPU if it has one. Peaks are since the process began."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        pages = int(file.read().split()[1])
    found = {
        "memory/cpu_gib": pages * _PAGE / _GIB,
        "memory/cpu_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["memory/device_gib"] = (total - free) / _GIB  # of all that use the device, such as NCCL
        found["memory/device_share"] = 1 - free / total
        found["memory/device_allocated_gib"] = torch.cuda.memory_allocated() / _GIB
        found["memory/device_peak_allocated_gib"] = torch.cuda.max_memory_allocated() / _GIB
        found["memory/device_peak_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
    return found


class OwnCost:
    """Contributes the CPU seconds since its last call: of this rank's observers, and of its whole process."""

    def __init__(self) -> None:
        self._overhead = overhead()
        self._calls, self._process = measured_calls(), time.process_time()

    def __call__(self) -> dict[str, float]:
        calls, process = measured_calls(), time.process_time()
        found = {
            _OBSERVERS: take_observing_seconds() + (calls - self._calls) * self._overhead,
            _RANK: process - self._process,
        }
        self._calls, self._process = calls, process
        return found


def own_cost_metrics(gathered: Gathered) -> dict[str, float]:
    """``observe/cpu_seconds`` of all ranks' observers since the step before, and their share of the ranks' CPU time."""
    observers, ranks = (
        sum(value for value in gathered.column(name) if not math.isnan(value)) for name in (_OBSERVERS, _RANK)
    )
    return {"observe/cpu_seconds": observers, "observe/cpu_share": observers / ranks if ranks else 0.0}
