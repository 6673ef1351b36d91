"""All hostile programs by class: those of ``programs/*.txt``, and responses that forge verdicts.

A program begins with ``=== NAME | WORDS``, where the words say what it needs: see ``Program``. ``endless``: it need not
finish. ``x86_64``: only on this processor.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.rewards.hostile.program import REASONS, Program, Response
from tests.rewards.hostile.verdicts import VERDICTS

_FOLDER = Path(__file__).with_name("programs")
_CLASSES = (
    "reading files",
    "writing files",
    "its own folder",
    "space beyond its folder",
    "network",
    "processes and threads",
    "signals",
    "other processes",
    "rights",
    "memory",
    "time",
    "calls of the kernel",
    "leaving its namespaces",
    "output and end",
)


def _programs(name: str) -> Iterator[Program]:
    text = (_FOLDER / f"{name.replace(' ', '_')}.txt").read_text(encoding="utf-8")
    for part in text.removeprefix("=== ").split("\n=== "):
        head, _, body = part.partition("\n")
        title, _, words = head.partition(" | ")
        if "x86_64" not in words or platform.machine() == "x86_64":
            yield Program(title, body, **_needs(words.split()))


def _needs(words: list[str]) -> dict[str, Any]:
    needs: dict[str, Any] = {"limits": {}}
    for word in words:
        key, _, value = word.partition("=")
        if word in REASONS:
            needs["unpromised"] = word
        elif word in ("alone", "landlock"):
            needs[word] = True
        elif word == "endless":
            needs["finishes"] = False
        elif key in ("within", "most_mib"):
            needs[key] = float(value)
        elif value:
            needs["limits"][key] = int(value)
        else:
            assert word == "x86_64", word
    return needs


CLASSES: dict[str, list[Program] | list[Response]] = {
    **{name: list(_programs(name)) for name in _CLASSES},
    "verdicts": VERDICTS,
}
