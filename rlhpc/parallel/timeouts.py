"""The timeout of every process group of this process, and of meetings of ranks: one value, set by ``groups.join``.

In a run the hang watch diagnoses a rank that does not come. A group that timed out before would blame the ranks that
wait for it, and a rank may wait for as long as another one makes progress, such as in a long rollout.
"""

from __future__ import annotations

import datetime

_ROOM_SECONDS = 86400.0  # a wait for ranks that make progress; the hang watch ends all others
_WITHOUT_WATCH_SECONDS = 1800.0  # torch's own default

_timeout = [datetime.timedelta(seconds=_WITHOUT_WATCH_SECONDS)]


def beyond(*hang_seconds: float) -> float:
    """Timeout in seconds of ranks whose hang watch has these limits."""
    return max(hang_seconds) + _ROOM_SECONDS


def use_timeout(seconds: float) -> None:
    """Sets the timeout of all groups that this process makes from now on."""
    _timeout[:] = [datetime.timedelta(seconds=seconds)]


def group_timeout() -> datetime.timedelta:
    """Timeout of a group that is made now."""
    return _timeout[0]


def timeout_seconds() -> float:
    return group_timeout().total_seconds()
