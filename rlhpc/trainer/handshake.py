"""What the trainers' first rank posts for the engines' ranks before RL and at the end, with ``placement: separate``."""

from __future__ import annotations

from rlhpc.core.stop import Reason
from rlhpc.parallel.board import Board
from rlhpc.parallel.channel import Inbox

_FOREVER = 1e9  # seconds to wait for the trainers: if they end, the channel to them shows it
_BEGIN, _END = "begin", "end"  # keys on the board


def post_begin(board: Board, *, generates: bool) -> None:
    """Announces RL. Without ``generates`` the attempt ends before."""
    board.post(_BEGIN, {"generates": generates})


def wait_for_begin(board: Board, inbox: Inbox) -> bool:
    """Waits until RL begins; whether engines generate."""
    return bool(board.wait_for(_BEGIN, _FOREVER, "waiting for RL", inbox.check)["generates"])


def post_end(board: Board, reason: Reason | None) -> None:
    """Announces that the trainers have all that they need of the engines. ``reason``: why the run stops early."""
    board.post(_END, {"reason": reason})


def wait_for_end(board: Board, inbox: Inbox) -> Reason | None:
    """Waits until the trainers end; returns why they stop early."""
    reason: Reason | None = board.wait_for(_END, _FOREVER, "waiting for the trainers", inbox.check)["reason"]
    return reason
