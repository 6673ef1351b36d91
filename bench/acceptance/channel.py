"""Messages from the processes of a part to the part, one JSON object per line. Torch-free."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, TextIO

from bench.acceptance.part import Figure, Goal, Skipped


class Channel:
    """The worker's end. Uses the original standard output; what libraries print goes to the log instead."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @classmethod
    def take_stdout(cls) -> Channel:
        """Reserve standard output for messages, and redirect other writers to standard error."""
        sys.stdout.flush()
        stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return cls(stream)

    def send(self, kind: str, value: Any) -> None:
        """Write one message."""
        line = json.dumps({"kind": kind, "value": value}, default=lambda scalar: scalar.item())  # numpy's and torch's
        self._stream.write(line + "\n")
        self._stream.flush()

    def report(self, result: Figure | Skipped) -> None:
        """Send a result of the part."""
        self.send("figure" if isinstance(result, Figure) else "skipped", asdict(result))

    def log(self, *text: object) -> None:
        """Send a line of progress."""
        self.send("log", " ".join(map(str, text)))


def result_of(kind: str, value: dict[str, Any]) -> Figure | Skipped:
    """The result that ``Channel.report`` sent."""
    if kind == "skipped":
        return Skipped(**value)
    return Figure(**{**value, "goal": Goal(**value["goal"]) if value["goal"] else None})
