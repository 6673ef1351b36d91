"""Engines that the trainers have given up, as their first rank posts them on the board of the job's store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

from rlhpc.core.store_keys import BOARD, LOST_ENGINES

_LOOK_SECONDS = 0.5


class LostByTrainers:
    """Reads them from the store, in a launcher's process."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        """``read``: gives a value of the store by its key, None if it is not there."""
        self._read, self._found, self._looked = read, dict[int, tuple[int, str]](), float("-inf")

    def read(self) -> dict[int, tuple[int, str]]:
        """By engine, the generation that was given up last, and why."""
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(ValueError, TypeError, AttributeError, IndexError):
                found = json.loads(self._read(f"{BOARD}/{LOST_ENGINES}") or b"{}")
                self._found = {int(engine): (int(lost[0]), str(lost[1])) for engine, lost in found.items()}
        return self._found
