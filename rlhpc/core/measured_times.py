"""Seconds of an attempt outside of its steps, as its ranks measure them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import AttemptFolder


@dataclass(frozen=True)
class AttemptTimes:
    """``start``: from the start of the ranks until the first step may begin, without ``models``, reading the weights of
    all models, and ``resume``, reading the checkpoint (None without one). ``saves``: checkpoints that training waited
    for until they were written."""

    start: float
    models: float
    resume: float | None = None
    saves: tuple[float, ...] = ()


def write_times(folder: AttemptFolder, times: AttemptTimes) -> None:
    write_json(folder.times, asdict(times))


def read_times(folder: AttemptFolder) -> AttemptTimes | None:
    """Returns None for an attempt that did not reach its first step, or whose file is not one."""
    try:
        found = read_json(folder.times)
        resume = found["resume"]
        times = AttemptTimes(
            _seconds(found["start"]),
            _seconds(found["models"]),
            None if resume is None else _seconds(resume),
            tuple(map(_seconds, found["saves"])),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return times


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a time")
    return float(value)
