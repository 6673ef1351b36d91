"""The user's notes on a run, one JSON object per line of notes.jsonl."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass

from rlhpc.core.errors import UserError
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import MetricsFile
from rlhpc.core.redaction import redact

LONGEST, MOST_BYTES = 2000, 1 << 20  # characters of a note; size of the file


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
    note = Note(time.time(), *(MetricsFile(folder.metrics).last_step() or ("rl", 0)), redact(text))
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
