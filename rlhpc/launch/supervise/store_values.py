"""The keys and values of the job's store, and the clients that wait for keys."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

from rlhpc.core.store_protocol import Op, ProtocolError, Status, as_number, number
from rlhpc.launch.supervise.beats import ReceivedBeats


class Wait:
    """A client waiting for ``keys``, one at a time, so that many keys cost no more memory."""

    def __init__(self, keys: Sequence[bytes], arrived: Callable[[Sequence[bytes]], None], *, with_values: bool) -> None:
        self.keys, self.with_values, self.arrived = keys, with_values, arrived
        self.next = 0
        self.timer: asyncio.TimerHandle | None = None


class StoreValues:
    """Keys, values, and waiting clients. Not thread-safe. ``beats``: heartbeats, which are no keys."""

    def __init__(self, beats: ReceivedBeats) -> None:
        self._beats = beats
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, dict[Wait, None]] = {}

    def value(self, key: bytes) -> bytes | None:
        """The value of a key, None if there is none."""
        return self._values.get(key)

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._values]

    def advance(self, wait: Wait) -> bool:
        """Answers ``wait`` if all its keys exist, else keeps it until the next one is set."""
        values = self._values
        while wait.next < len(wait.keys):
            key = wait.keys[wait.next]
            if key not in values:
                self._waiting.setdefault(key, {})[wait] = None
                return False
            wait.next += 1
            if wait.next == len(wait.keys) and wait.with_values and self.missing(wait.keys):
                wait.next = 0  # a key was deleted meanwhile
        if wait.timer is not None:
            wait.timer.cancel()
        wait.arrived([values[key] for key in wait.keys] if wait.with_values else ())
        return True

    def forget(self, wait: Wait) -> None:
        """Removes ``wait``."""
        if wait.timer is not None:
            wait.timer.cancel()
        if wait.next < len(wait.keys):
            key = wait.keys[wait.next]
            self._waiting.get(key, {}).pop(wait, None)
            if not self._waiting.get(key, True):
                del self._waiting[key]

    def answer(self, code: int, fields: list[bytes]) -> tuple[Status, Sequence[bytes]]:
        """Executes a request that needs no waiting."""
        match code, fields:
            case Op.BEAT, [rank, record]:
                return Status.DONE, [self._beats.receive(as_number(rank), record)]
            case Op.SET, [key, value]:
                self._put(key, value)
            case Op.ADD, [key, amount]:
                return self._add(key, as_number(amount))
            case Op.CHECK, keys:
                return Status.DONE, [number(int(not self.missing(keys)))]
            case Op.COMPARE_SET, [key, expected, desired]:
                return Status.DONE, [self._compare_set(key, expected, desired)]
            case Op.DELETE, [key]:
                return Status.DONE, [number(self._values.pop(key, None) is not None)]
            case Op.NUM_KEYS, []:
                return Status.DONE, [number(len(self._values))]
            case Op.APPEND, [key, value]:
                self._put(key, self._values.get(key, b"") + value)
            case Op.MULTI_SET, pairs if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._put(key, value)
            case Op.MULTI_APPEND, pairs if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._put(key, self._values.get(key, b"") + value)
            case _:
                raise ProtocolError(f"request {code} with {len(fields)} fields")
        return Status.DONE, ()

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            self.advance(wait)

    def _add(self, key: bytes, amount: int) -> tuple[Status, Sequence[bytes]]:
        try:
            total = int(self._values.get(key, b"0")) + amount
            answer = [number(total)]
        except (ValueError, struct.error):
            return Status.INVALID, [b"the value is not a 64-bit number"]
        self._put(key, str(total).encode())
        return Status.DONE, answer

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Value afterwards; ``expected`` if there is none but one was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return desired
        return expected if present is None else present
