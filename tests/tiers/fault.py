"""A wrong line of rlhpc that a test should find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One or two wrong lines: ``new`` in place of ``old``, which occurs exactly once in ``file``."""

    name: str
    file: str
    breaks: str  # effect on a user
    old: str
    new: str

    def planted(self, text: str) -> str:
        """``text`` of the file with the fault. Raises ValueError unless the line occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.old.strip()!r} occurs {count} times in {self.file}, not once;"
                " update the fault in tests/tiers/planted.py"
            )
        return text.replace(self.old, self.new)
