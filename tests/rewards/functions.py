"""Rewards for the tests, as a user has them: in a module that a worker imports."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.rewards.rules import number

KEPT: list[bytearray] = []
RESULTS: dict[str, Any] = {
    "float": 0.25,
    "bool": True,
    "numpy": np.float32(0.5),
    "numpy bool": np.bool_(True),
    "dict": {"score": 2, "note": "x", "words": 3, "odd": float("nan"), "good": True},
    "nan": float("nan"),
    "infinite": {"score": float("inf")},
    "text": "1.0",
    "none": None,
    "numpy array": np.zeros(2),
    "too large": 10**400,
    "too large a part": {"score": 1, "part": -(10**400)},
    "other dict": {"reward": 1.0},
}


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _grow_in_small_pieces() -> float:
    """Of every size, until none is left; what it has allocated lives as long as the exception does."""
    kept: tuple[Any, ...] = ()
    for size in range(600, -1, -8):
        try:
            for _ in range(1_000_000):
                kept = (kept, bytes(size), 0.5 * size)
        except MemoryError:
            continue
    return float(len(bytes(1 << 30)))


def _raise(error: BaseException) -> None:
    raise error


def selected(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    return RESULTS[solution_str]


def plus(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], more: float) -> float:
    return more + len(solution_str) + extra_info["index"]


def tokens(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    response_tokens: int,
    max_response_tokens: int,
) -> dict[str, float]:
    return {"score": response_tokens, "most": max_response_tokens}


def does(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """What the response says: a name of the functions below; anything else is worth its length."""
    action = {
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(4),
        "raise in silence": lambda: _raise(Silent()),
        "nan": lambda: float("nan"),
        "hang": lambda: time.sleep(1000),
        "leave": lambda: os._exit(3),
        "crash": lambda: ctypes.string_at(0),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "killed by another": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3),
        "grow": lambda: len([bytearray(16 << 20) for _ in range(60)]),
        "grow in small pieces": _grow_in_small_pieces,
        "keep": lambda: len(KEPT.append(bytearray(60 << 20)) or KEPT),
    }.get(solution_str)
    return action() if action else len(solution_str)


def hangs_with_child(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Hangs, with a child whose number it writes into the file that the response names."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(solution_str).write_text(f"{os.getpid()} {child.pid}")
    return child.wait()


def meets(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], name: str) -> float:
    """Ends when all the others of ``ground_truth`` have come too, into the folder that the response names."""
    folder = Path(solution_str)
    (folder / name).touch()
    while not all((folder / other).exists() for other in ground_truth):
        time.sleep(0.01)
    return 1.0


def process(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """About the process that scores."""
    links = {int(name): _link(name) for name in os.listdir("/proc/self/fd")}
    sockets = [link for link in links.values() if link.startswith("socket:")]
    given = [number for number, link in links.items() if number > 2 and link and os.get_inheritable(number)]
    return {"score": os.getpid(), "torch": "torch" in sys.modules, "sockets": len(sockets), "given": len(given)}


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def sleeps(data_source: str, solution_str: str, ground_truth: float, extra_info: dict[str, Any]) -> float:
    """As long as the ground truth says."""
    time.sleep(ground_truth)
    return 1.0


def unhurried_number(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """For runs that a test lets go on while it waits for something else: without it their steps take all cores."""
    time.sleep(0.01)
    return number(data_source, solution_str, ground_truth, extra_info)


NOT_A_FUNCTION = 3


def telling(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """As other trainers' functions tell what they take for the answer."""
    words = solution_str.split()
    return {"score": 1.0, "words": len(words), "pred": int(words[-1]) if words else None}


def with_check(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], least: int = 0
) -> float:
    return 0.0


def _check_truth(data_source: str, ground_truth: Any, least: int) -> None:
    if ground_truth == "hang":
        time.sleep(100)
    if ground_truth < least:
        raise ValueError(f"it is below {least}")


with_check.check_ground_truth = _check_truth
