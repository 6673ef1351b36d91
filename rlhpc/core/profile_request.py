"""Request for a profile of a running job, and its answer: two files in the run folder.

`rlhpc profile` writes a request; the first rank reads it at the end of a step and answers. One request at a time: a new
one replaces one that no rank has read.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder
from rlhpc.core.profiles import Selection, from_json
from rlhpc.core.storage import NONE, Patience


@dataclass(frozen=True)
class ProfileRequest:
    """``relative``: its steps count from the step that runs when it is read."""

    id: str
    selection: Selection
    relative: bool = False

    def at(self, step: int) -> Selection:
        """The selection, if it is read after ``step``."""
        shift = step if self.relative else 0
        return replace(self.selection, first=self.selection.first + shift, last=self.selection.last + shift)


@dataclass(frozen=True)
class ProfileAnswer:
    """Answer to the request ``id``: the steps that will be profiled, or the reason why none will."""

    id: str
    selection: Selection
    refused: str = ""


def new_request(selection: Selection, *, relative: bool) -> ProfileRequest:
    return ProfileRequest(uuid.uuid4().hex, selection, relative)


def write_request(run: RunFolder, request: ProfileRequest) -> None:
    """Writes the request; its folder must exist."""
    record = {"id": request.id, "time": time.time(), "relative": request.relative}
    write_json(run.profile_request, {**record, **request.selection.as_json()})


def read_request(run: RunFolder) -> ProfileRequest | None:
    """The newest request, without waiting for storage; None if there is none or it cannot be read."""
    try:
        record = read_json(run.profile_request, NONE)
        return ProfileRequest(str(record["id"]), from_json(record), record["relative"] is True)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_answer(run: RunFolder, answer: ProfileAnswer, patience: Patience | None = None) -> None:
    """Writes the answer."""
    record = {"id": answer.id, "time": time.time(), "refused": answer.refused}
    write_json(run.profile_answer, {**record, **answer.selection.as_json()}, patience)


def read_answer(run: RunFolder) -> ProfileAnswer | None:
    """The newest answer, without waiting for storage; None if there is none or it cannot be read."""
    try:
        record = read_json(run.profile_answer, NONE)
        return ProfileAnswer(str(record["id"]), from_json(record), str(record["refused"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
