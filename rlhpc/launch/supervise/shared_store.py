"""The store of a run's attempt as rollout jobs reach it: its address, in a private file, and a connection to it."""

from __future__ import annotations

import json
from contextlib import suppress

from rlhpc.core.errors import StoreError
from rlhpc.core.files import read_json, remove, write_atomic
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.storage import NONE
from rlhpc.core.store_client import StoreAddress, StoreConnection, reach
from rlhpc.core.store_protocol import Op, ProtocolError, Status, as_number, seconds

_CONNECT_SECONDS = 20.0


def share_store(attempt: AttemptFolder, address: StoreAddress) -> None:
    """Writes the address, with the secret, where only the user can read it."""
    known = {"host": address.host, "port": address.port, "secret": address.secret.hex()}
    write_atomic(attempt.store, json.dumps(known), private=True)


def forget_store(attempt: AttemptFolder) -> None:
    """Removes the address of a store that is no more."""
    remove(attempt.store)


def find_store(attempt: AttemptFolder) -> StoreAddress | None:
    """The address; None if the attempt has none, or not yet."""
    try:
        known = read_json(attempt.store, NONE)
        return StoreAddress(str(known["host"]), int(known["port"]), bytes.fromhex(known["secret"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


class SharedStore:
    """A connection to the store. It ends with the attempt's launcher."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection, self.lost = connection, False

    @classmethod
    def connect(cls, address: StoreAddress) -> SharedStore | None:
        """None if the launcher does not answer: it has ended, or it has another store."""
        with suppress(StoreError):
            return cls(reach(address, _CONNECT_SECONDS))
        return None

    def read(self, key: str) -> bytes | None:
        """A value, None if it is not there, or if the connection is ``lost``."""
        name = key.encode()
        try:
            _, found = self._connection.call(Op.CHECK, [name])
            if not as_number(found[0]):
                return None
            status, values = self._connection.call(Op.GET, [seconds(0.0), name])
        except (OSError, ProtocolError):
            self.lost = True
            return None
        return values[0] if status == Status.DONE else None

    def close(self) -> None:
        """Disconnects."""
        self._connection.close()
