"""Checks that a node can reach the job's store. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlhpc.core import env
from rlhpc.core.store_client import StoreAddress, reach

# The store listens before the ranks start. A connection takes milliseconds, or seconds if a packet is lost.
_CONNECT_SECONDS = 15.0


def check_store(environ: Mapping[str, str] = os.environ, seconds: float = _CONNECT_SECONDS) -> None:
    """Raises StoreError if the store that the launcher has named cannot be reached. Passes without one."""
    text, secret = environ.get(env.RLHPC_STORE), environ.get(env.RLHPC_STORE_SECRET)
    if text and secret:
        reach(StoreAddress.parse(text, secret), seconds).close()
