"""The engines' part of a checkpoint: every path inside it, named once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlhpc.core.files import names_in


@dataclass(frozen=True)
class EnginesFolder:
    """Folder of the engines' parts in a checkpoint (rlhpc.rollout.generator.state)."""

    path: Path
    NAME: ClassVar[str] = "engines"

    def groups(self, engine: int) -> Path:
        """Groups of an engine, from their first request until they have been trained on."""
        return self.path / f"engine-{engine:05d}.npz"

    def state(self, engine: int) -> Path:
        """Its schedule and its requests."""
        return self.path / f"engine-{engine:05d}.json"

    def writers(self) -> list[int]:
        """The engines that have written their parts: all, but for those that were lost."""
        return [int(name[7:12]) for name in names_in(self.path, "engine-*.json")]
