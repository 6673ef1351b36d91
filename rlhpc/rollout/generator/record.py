"""The record of a run whose generation follows real time: what each engine did, and what each step trained on.

With the same engines, threads and configuration a replay of it is equal bit for bit. Each attempt has a file of lines
``{"engine": E, "life": N, "acts": [[version, steps, kind, value], ...]}`` and ``{"step": S, "kept": [...], "dropped":
[...], "by": [[group, E, N], ...]}``, where N is how often the engine was started before in the attempt.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.core.attempts import folders
from rlhpc.core.errors import UserError
from rlhpc.core.files import LineFile
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.records import read_records
from rlhpc.core.storage import exists
from rlhpc.rollout.schedule.acts import Act, acts_json, acts_of
from rlhpc.rollout.schedule.arrival_batches import RecordedBatch, Source
from rlhpc.rollout.schedule.batches import ClosedBatch


@dataclass(frozen=True)
class Record:
    """``lives``: of each engine, its acts in order, from each of its starts without state on; ``batches``: of each
    step, from 0."""

    lives: Mapping[int, Sequence[Sequence[Act]]]
    batches: Mapping[int, RecordedBatch]


class RecordWriter:
    """Writes an attempt's part of the record, on the trainers' first rank."""

    def __init__(self, folder: AttemptFolder, version: int) -> None:
        """``version``: the first one of the attempt. What former attempts recorded from it on is void."""
        self._file = LineFile(folder.generation_record)
        self._lines: list[dict[str, Any]] = [{"version": version}]

    def acts(self, engine: int, life: int, acts: Sequence[Act]) -> None:
        """Adds what an engine has done. ``life``: how often it was started before."""
        if acts:
            self._lines.append({"engine": engine, "life": life, "acts": acts_json(acts)})

    def batch(self, batch: ClosedBatch, sources: Mapping[int, Source]) -> None:
        """Adds a step's groups; ``sources``: who has delivered each."""
        by = [[group, *sources[group]] for group in batch.groups]
        self._lines.append({"step": batch.number, "kept": [*batch.kept], "dropped": [*batch.dropped], "by": by})

    def flush(self) -> None:
        """Writes what was added."""
        lines, self._lines = self._lines, []
        if lines:
            self._file.append("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read_record(run: RunFolder) -> Record:
    """The record of all attempts of a run; raises a UserError if it has none."""
    found = [each.generation_record for each in folders(run) if exists(each.generation_record)]
    if not found:
        raise UserError(
            f"{run.path} has no record of its generation",
            where="asynchrony.replay",
            remedy="name the folder of a run with asynchrony.schedule arrival, or one that may lose engines",
        )
    reader = _Reader()
    for file in found:
        for line in read_records(file):
            reader.take(line)
    return Record(reader.lives, reader.batches)


class _Reader:
    """Puts the attempts of a run together."""

    def __init__(self) -> None:
        self.lives: dict[int, list[list[Act]]] = defaultdict(list)
        self.batches: dict[int, RecordedBatch] = {}
        self._begins: dict[int, int] = {}  # by engine, its first life in this attempt
        self._version = 0

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes a line."""
        if "version" in line:
            self._begin(line["version"])
        elif "engine" in line:
            engine = line["engine"]
            life = self._life(engine, line["life"])
            lives = self.lives[engine]
            lives += [[] for _ in range(life + 1 - len(lives))]
            lives[life] += acts_of(line["acts"])
        else:
            sources = {group: (engine, self._life(engine, life)) for group, engine, life in line["by"]}
            self.batches[line["step"]] = RecordedBatch(tuple(line["kept"]), tuple(line["dropped"]), sources)

    def _begin(self, version: int) -> None:
        """An attempt begins, from a checkpoint of this version."""
        self._version = version
        for engine, lives in self.lives.items():
            self.lives[engine] = [[act for act in acts if act.version < version] for acts in lives]
        for step in [step for step in self.batches if step >= version]:
            del self.batches[step]
        self._begins = {engine: self._first_life(lives) for engine, lives in self.lives.items()}

    def _first_life(self, lives: Sequence[Sequence[Act]]) -> int:
        """The life with which an engine goes on: its last one, if that has reached the checkpoint."""
        last = len(lives) - 1
        reached = bool(lives[last]) and lives[last][-1].kind == "switch" and lives[last][-1].value == self._version
        return last if reached or not any(lives) else last + 1

    def _life(self, engine: int, life: int) -> int:
        """A life of the run, from one of the attempt."""
        return self._begins.get(engine, 0) + life
