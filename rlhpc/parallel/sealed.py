"""MACs under the job's secret on objects that ranks exchange, checked before anything unpickles them.

gloo and NCCL do not authenticate connections: whoever connects to a rank as it starts can pose as another rank, and a
pickle of theirs would run code. A MAC does not name sender, receiver or time: an object of this job can be repeated by
a program that can read packets. Tensors have none.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

_MAC_BYTES = 32
_keys: list[bytes] = []  # of the job that this process has joined last


class ForgedObject(RuntimeError):
    """The received bytes are not an object of this job."""


def use_secret(secret: bytes) -> None:
    """Requires MACs under ``secret`` from here on."""
    _keys[:] = [hmac.digest(secret, b"rlhpc objects of ranks", sha256)]


def number_of(secret: bytes) -> int:
    """Number of 64 bits that only ranks of the job know."""
    return int.from_bytes(hmac.digest(secret, b"rlhpc connections of ranks", sha256)[:8], "big")


def seal(content: bytes) -> bytes:
    """``content`` with its MAC; ``content`` alone in a job without a secret."""
    return content + hmac.digest(_keys[0], content, sha256) if _keys else content


def opened(sealed: bytes) -> bytes:
    """Content of ``sealed``. Raises ForgedObject without a valid MAC."""
    if not _keys:
        return sealed
    content, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(_keys[0], content, sha256)):
        raise ForgedObject(
            f"{len(sealed):,} bytes received as an object of another rank, but no rank of this job sent them"
        )
    return content
