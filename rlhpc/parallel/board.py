"""Small values that all of the job's ranks can read, of all roles: a board in the job's store."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from rlhpc.core.errors import PeerLost
from rlhpc.core.heartbeat import enter
from rlhpc.core.store_client import BOARD

_LARGEST = 4 << 20  # bytes of a value
_LOOK = datetime.timedelta(seconds=0.5)  # between two signs of life


class Board:
    """JSON values by key in any store of torch's. Boards of one name and store are one, on all ranks.

    A thread that waits here needs a board of its own: torch's TCPStore serves one call of a client at a time.
    """

    def __init__(self, store: dist.Store, name: str = BOARD) -> None:
        self._store, self._name = store.clone(), name

    def post(self, key: str, value: Any) -> None:
        """Sets or replaces a value."""
        text = json.dumps(value, separators=(",", ":"))
        assert len(text) <= _LARGEST, f"{len(text):,} bytes for key {key} of the board, which takes {_LARGEST:,}"
        self._store.set(self._key(key), text)

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that are there. Does not wait."""
        wanted = list(keys)
        if wanted and not self._store.check([self._key(key) for key in wanted]):  # asks for all at once
            wanted = [key for key in wanted if len(wanted) > 1 and self._store.check([self._key(key)])]
        return {key: json.loads(value) for key, value in zip(wanted, self._get(wanted), strict=True)}

    def wait_for(
        self, key: str, seconds: float, phase: str | None = None, check: Callable[[], object] | None = None
    ) -> Any:
        """The value, as soon as it is there. Raises PeerLost after ``seconds``; see ``find``."""
        found = self.find(key, seconds, phase, check)
        if found is None:
            raise PeerLost(f"no rank has posted {key} on the board within {seconds:g} s")
        return found

    def find(
        self, key: str, seconds: float, phase: str | None = None, check: Callable[[], object] | None = None
    ) -> Any | None:
        """The value, as soon as it is there; None after ``seconds``.

        Meanwhile the rank's heartbeat shows ``phase``, and ``check`` is called twice a second, for what it raises.
        """
        deadline = time.monotonic() + seconds
        while True:
            enter(phase or f"waiting for {key}")
            if check is not None:
                check()
            left = deadline - time.monotonic()
            try:
                self._store.wait([self._key(key)], min(_LOOK, datetime.timedelta(seconds=max(left, 0.001))))
            except dist.DistStoreError:  # not there yet
                if left <= 0:
                    return None
            else:
                return json.loads(self._store.get(self._key(key)))

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, which begins with 0; returns its value. A counter's key holds nothing else."""
        return int(self._store.add(self._key(key), number))

    def drop(self, key: str) -> None:
        """Removes a value, if it is there. Nobody may be about to read it."""
        self._store.delete_key(self._key(key))

    def _get(self, keys: list[str]) -> list[bytes]:
        """Values that are there, with one request if the store can."""
        names = [self._key(key) for key in keys]
        if names and self._store.has_extended_api():
            return list(self._store.multi_get(names))
        return [self._store.get(name) for name in names]

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"
