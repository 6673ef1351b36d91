"""Rewards for models with random weights, which never answer correctly. Torch-free: called in worker processes."""

from __future__ import annotations

import zlib
from typing import Any


def varied(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """A number from 0 to 1 that depends only on the text, so that every group has non-zero advantages."""
    return zlib.crc32(solution_str.encode()) % 256 / 255
