"""Lengths of earlier steps' responses by prompt, from which those of the next are expected. Part of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlhpc.core.storage import exists, patiently
from rlhpc.data.groups import Group

_FILE = "response_lengths.npz"


@dataclass
class ResponseLengths:
    """``mean``: tokens that the policy sampled in a response, over those of the newest step; 0 before the first.
    ``ratios``: by prompt id the mean of its newest group, over the mean of that step."""

    mean: float = 0.0
    ratios: dict[int, float] = field(default_factory=dict)

    def record(self, lengths: Mapping[int, Sequence[int]]) -> None:
        """Notes a step's responses by prompt id."""
        every = [length for found in lengths.values() for length in found]
        if not any(every):
            return
        self.mean = sum(every) / len(every)
        for prompt_id, found in lengths.items():
            self.ratios[prompt_id] = sum(found) / len(found) / self.mean

    def of_groups(self, first: int, prompt_ids: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Groups from ``first`` on, which have these prompts, with their ratios where these are known."""
        placed = enumerate(prompt_ids, first)
        return tuple((group, self.ratios[each]) for group, each in placed if each in self.ratios)

    def save(self, folder: Path) -> None:
        """Writes them into a checkpoint's folder, if there are any."""
        if not self.ratios:
            return
        ids = np.fromiter(self.ratios, dtype=np.int64)
        ratios = np.fromiter(self.ratios.values(), dtype=np.float64)
        file = folder / _FILE

        def write() -> None:
            with open(file, "wb") as stream:
                np.savez(stream, mean=self.mean, ids=ids, ratios=ratios)
                stream.flush()
                os.fsync(stream.fileno())

        patiently(write, file)

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote; nothing from checkpoints without it."""
        file = folder / _FILE
        if not exists(file):
            return
        with patiently(lambda: np.load(file, allow_pickle=False), file) as found:
            self.mean = float(found["mean"])
            self.ratios = dict(zip(found["ids"].tolist(), found["ratios"].tolist(), strict=True))


def sampled_lengths(groups: Iterable[Group]) -> dict[int, list[int]]:
    """Tokens that the policy sampled in each response, by prompt id."""
    found: dict[int, list[int]] = {}
    for group in groups:
        found.setdefault(group.prompt_id, []).extend(sample.sampled_len for sample in group.samples)
    return found
