"""What the trainers' first rank posts on the board of the job's store, as a launcher reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

from rlhpc.core.store_client import BEGIN, BOARD, LOST_ENGINES, TRAINERS, TrainersStart

_LOOK_SECONDS = 0.5


class TrainersBoard:
    """The board of the trainers' present start."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        """``read``: gives a value of the store by its key, None if it is not there."""
        self._read, self._lost, self._looked = read, dict[int, tuple[int, str]](), float("-inf")

    def lost_engines(self) -> dict[int, tuple[int, str]]:
        """By engine, how often it was started before in the attempt when it was given up last, and why."""
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(ValueError, TypeError, AttributeError, LookupError):
                start = self._start()
                found = json.loads(self._read(start.key(f"{BOARD}/{LOST_ENGINES}")) or b"{}")
                lost = {int(engine): (int(given_up[0]), str(given_up[1])) for engine, given_up in found.items()}
                self._lost = {one: (start.engines.get(one, 0) + n, why) for one, (n, why) in lost.items()}
        return self._lost

    def has_begun(self) -> bool:
        """Whether RL has begun, so that the trainers are connected with all engines that begin with them."""
        return self._read(self._start().key(f"{BOARD}/{BEGIN}")) is not None

    def _start(self) -> TrainersStart:
        return TrainersStart.from_json(self._read(TRAINERS))
