"""The trainers' present start, which engines that outlive them learn from the job's store.

The launcher posts it when it starts trainers again. What trainers and engines post for each other is under a prefix of
that start, so that each begins with empty boards and connections of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhpc.core.store_keys import TRAINERS


@dataclass(frozen=True)
class TrainersStart:
    """``generation``: how often the trainers were started before in this attempt; ``engines``: how often those engines
    were that were there then, which to these trainers begin with them."""

    generation: int = 0
    engines: Mapping[int, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Of keys in the job's store; empty for the first start."""
        return f"{TRAINERS} {self.generation}" if self.generation else ""

    def key(self, name: str) -> str:
        """A key of this start."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def generation_of(self, engine: int, generation: int) -> int:
        """How often these trainers have seen an engine begin before, which was started ``generation`` times before in
        the attempt."""
        return generation - self.engines.get(engine, 0)

    def to_json(self) -> str:
        return json.dumps({"generation": self.generation, "engines": {str(one): n for one, n in self.engines.items()}})

    @classmethod
    def from_json(cls, text: str | bytes | None) -> TrainersStart:
        """The start that was posted; the first one if ``text`` is None."""
        if text is None:
            return cls()
        known = json.loads(text)
        return cls(int(known["generation"]), {int(engine): int(n) for engine, n in known["engines"].items()})
