"""Profiles of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Profiled:
    """Layers by name, and what is in flight."""

    named: dict[str, Any]
    settle: Callable[[], None] = lambda: None

    def layers(self) -> list[tuple[str, Any]]:
        return list(self.named.items())
