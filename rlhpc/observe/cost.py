"""Cost of a run over all its attempts: GPU-hours, idle ones, tokens. Work that is lost and repeated counts again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

from rlhpc.core.attempts import folders, read_attempt, read_verdict
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import AttemptFolder

_WRITE_SECONDS = 30.0
_HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    """Seconds of all ranks, those in which they waited, tokens trained on, and seconds of ranks that were not there:
    those of rollout jobs."""

    rank_seconds: float = 0.0
    idle_seconds: float = 0.0
    tokens: float = 0.0
    absent_seconds: float = 0.0  # not among rank_seconds

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rank_seconds + other.rank_seconds,
            self.idle_seconds + other.idle_seconds,
            self.tokens + other.tokens,
            self.absent_seconds + other.absent_seconds,
        )

    def metrics(self) -> dict[str, float]:
        """``cost/…``. A rank has one GPU; without GPUs they are hours of ranks."""
        return {
            "cost/gpu_hours": self.rank_seconds / _HOUR,
            "cost/idle_gpu_hours": self.idle_seconds / _HOUR,
            "cost/tokens": self.tokens,
        }


class CostMeter:
    """Cost of an attempt so far, with that of all earlier ones."""

    def __init__(self, attempt: AttemptFolder, world_size: int) -> None:
        record = read_attempt(attempt)
        self._folder, self._world_size = attempt, world_size
        self._started = record.started if record is not None else time.time()
        self._earlier, former = earlier_cost(attempt), _written(attempt)  # by trainers before, within the attempt
        self._idle, self._tokens, self._absent = former.idle_seconds, former.tokens, former.absent_seconds
        self._written = time.monotonic()

    def add(self, idle_seconds: float, tokens: float, absent_seconds: float = 0.0) -> Cost:
        """Counts a step; the cost of the run until now."""
        self._idle, self._tokens = self._idle + idle_seconds, self._tokens + tokens
        self._absent += absent_seconds
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self.write()
        return self._earlier + self._own()

    def write(self) -> None:
        """Writes the attempt's own cost, for the attempts after it."""
        self._written = time.monotonic()
        write_json(self._folder.cost, asdict(self._own()))

    def _own(self) -> Cost:
        present = (time.time() - self._started) * self._world_size - self._absent
        return Cost(present, self._idle, self._tokens, self._absent)


def earlier_cost(attempt: AttemptFolder) -> Cost:
    """Cost of the attempts before this one."""
    earlier = [folder for folder in folders(attempt.run) if folder.number < attempt.number]
    return sum(map(_cost_of, earlier), Cost())


def _cost_of(folder: AttemptFolder) -> Cost:
    """As last written, but with the whole time if the attempt has a verdict: a hang or a loss costs, too."""
    written = _written(folder)
    record, verdict = read_attempt(folder), read_verdict(folder)
    if record is None or verdict is None:
        return written
    seconds = (verdict.time - record.started) * record.world_size - written.absent_seconds
    return replace(written, rank_seconds=max(written.rank_seconds, seconds))


def _written(folder: AttemptFolder) -> Cost:
    try:
        return Cost(**{name: float(value) for name, value in read_json(folder.cost).items()})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return Cost()
