"""The user's notes on a run, one JSON object per line of notes.jsonl."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import is_step, parse_records
from rlhpc.core.redaction import redact

LONGEST, MOST_BYTES = 2000, 1 << 20  # characters of a note; size of the file
_TAIL = 1 << 16  # bytes in which the last record is looked for, first


@dataclass(frozen=True)
class Note:
    """A note and the step that was done when it was written."""

    time: float
    phase: str
    step: int
    text: str


def add_note(folder: RunFolder, text: str) -> Note:
    """Appends a note at the run's last step."""
    if not text.strip() or len(text) > LONGEST:
        problem = f"has {len(text)} characters" if text.strip() else "is empty"
        raise UserError(f"the note {problem}", where="TEXT", remedy=f"write 1 to {LONGEST} characters")
    note = Note(time.time(), *last_step(folder.metrics), redact(text))
    line = (json.dumps(asdict(note)) + "\n").encode()
    descriptor = os.open(folder.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if os.fstat(descriptor).st_size + len(line) > MOST_BYTES:
            raise UserError(
                f"is full: {MOST_BYTES >> 20} MiB", where=str(folder.notes), remedy="remove notes from the file"
            )
        os.write(descriptor, line)  # one call: two users may write at once
    finally:
        os.close(descriptor)
    return note


def last_step(metrics: Path) -> tuple[str, int]:
    """Phase and step of the last record in metrics.jsonl; RL's step 0 without any. Reads the end of the file only."""
    tail = _TAIL
    while True:
        try:
            with open(metrics, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - tail))
                data = file.read()
        except FileNotFoundError:
            return "rl", 0
        for record in reversed(parse_records(data)):
            if is_step(record):
                return record["phase"], record["step"]
        if tail >= size:
            return "rl", 0
        tail *= 8
