"""Engines that the trainers have given up, as their first rank posts them on the board of the job's store."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from rlhpc.core.store_keys import BOARD, LOST_ENGINES
from rlhpc.launch.supervise.rendezvous_server import StoreServer

_LOOK_SECONDS = 0.5


class LostByTrainers:
    """Reads them from the store, in the launcher's process."""

    def __init__(self, store: StoreServer) -> None:
        self._store, self._found, self._looked = store, dict[int, tuple[int, str]](), float("-inf")

    def read(self) -> dict[int, tuple[int, str]]:
        """By engine, the generation that was given up last, and why."""
        if time.monotonic() > self._looked + _LOOK_SECONDS:
            self._looked = time.monotonic()
            with suppress(ValueError, TypeError, AttributeError, IndexError):
                found = json.loads(self._store.read(f"{BOARD}/{LOST_ENGINES}") or b"{}")
                self._found = {int(engine): (int(lost[0]), str(lost[1])) for engine, lost in found.items()}
        return self._found
