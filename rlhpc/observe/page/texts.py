"""Samples of a run: those of validations, and of training steps if they were kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number
from rlhpc.observe.page.marks import read_lines

MOST_SAMPLES = 1500  # of all runs on the page
MOST_CHARACTERS = 1_200_000  # likewise
_SHORTEST, _LONGEST = 300, 6000  # characters of one text
FIELDS = ("kind", "step", "name", "reward", "state", "prompt", "response", "expected")
VALIDATION, TRAINING = "validation", "training"


def read_samples(run: RunFolder, most: int) -> list[dict[str, Any]]:
    """The newest samples, the oldest of them first."""
    found = [{**sample, "kind": VALIDATION} for sample in read_lines(run.samples) if type(sample.get("step")) is int]
    return found[-most:]


def pack_samples(samples: Sequence[dict[str, Any]], longest: int) -> list[list[Any]]:
    """Rows of ``FIELDS``. Of a longer text, its beginning and end are kept."""
    return [_row(sample, longest) for sample in samples]


def longest_text(samples: int) -> int:
    """Maximum length of a text on a page with so many samples."""
    return max(_SHORTEST, min(_LONGEST, MOST_CHARACTERS // max(1, 2 * samples)))


def _row(sample: dict[str, Any], longest: int) -> list[Any]:
    reward = number(sample.get("reward"))
    right = sample.get("correct")
    state = ["", "correct", "wrong"][0 if right is None else 1 if right else 2]
    words = [state, "truncated" if sample.get("truncated") else ""]
    texts = (_shortened(_text(sample.get(name)), longest) for name in ("prompt", "response", "expected"))
    name = " ".join(str(sample[key]) for key in ("set", "source") if sample.get(key))
    shown = None if reward is None or reward != reward else reward
    return [sample["kind"], sample["step"], name, shown, " ".join(filter(None, words)), *texts]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=str, ensure_ascii=False)


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head = longest * 2 // 3
    left_out = len(text) - longest
    return f"{text[:head]}\n[… {left_out:,} characters …]\n{text[len(text) - (longest - head) :]}"
