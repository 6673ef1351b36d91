"""Samples of a run: those of validations, and of training steps if they were kept."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlhpc.core.folder import RunFolder
from rlhpc.core.records import number, read_records
from rlhpc.observe.training_samples import file_of, kept_steps, read_file

MOST_SAMPLES = 1500  # of all runs on the page
_SHORTEST, _LONGEST = 300, 6000  # characters of one text
_TEXT_FIELDS = ("prompt", "response", "expected")
_LEAST_OF_STEP = 8  # training samples
FIELDS = ("kind", "step", "name", "reward", "state", "prompt", "response", "expected")
VALIDATION, TRAINING = "validation", "training"


@dataclass(frozen=True)
class Samples:
    """Samples of a run, the oldest first. ``unread``: steps of training whose samples were not read."""

    found: list[dict[str, Any]]
    unread: int = 0


def read_samples(run: RunFolder, most: int, *, training: bool) -> Samples:
    """The newest samples of validations and, with ``training``, of training steps, which needs pyarrow."""
    steps = kept_steps(run)
    taught = list(_training(run, steps, most // 2)) if training and steps and find_spec("pyarrow") else []
    lines = [line for line in read_records(run.samples) if type(line.get("step")) is int]
    found = [{**line, "kind": VALIDATION} for line in lines[len(taught) - most :]]
    return Samples([*found, *taught], 0 if taught else len(steps))


def _training(run: RunFolder, steps: Sequence[int], most: int) -> Iterator[dict[str, Any]]:
    """Samples of training steps, about as many of each."""
    each = max(_LEAST_OF_STEP, most // len(steps))
    for step in steps[-(most // each) :]:
        with contextlib.suppress(OSError, ValueError, KeyError):  # removed meanwhile, or of another version
            rows = read_file(file_of(run, step))
            for row in rows[:: max(1, -(-len(rows) // each))]:
                yield {**row, "kind": TRAINING}


def pack_samples(samples: Sequence[dict[str, Any]], longest: int) -> list[list[Any]]:
    """Rows of ``FIELDS``. Of a longer text, its beginning and end are kept."""
    return [_row(sample, longest) for sample in samples]


def longest_text(samples: Sequence[dict[str, Any]], room: float) -> int:
    """Maximum length of a text at which all together have at most ``room`` characters."""
    lengths = [len(_text(sample.get(name))) for sample in samples for name in _TEXT_FIELDS]
    least, most = _SHORTEST, _LONGEST
    while least < most:
        middle = (least + most + 1) // 2
        if sum(min(length, middle) for length in lengths) <= room:
            least = middle
        else:
            most = middle - 1
    return least


def _row(sample: dict[str, Any], longest: int) -> list[Any]:
    reward = number(sample.get("reward"))
    right = sample.get("correct")
    state = ["", "correct", "wrong"][0 if right is None else 1 if right else 2]
    words = [state, "truncated" if sample.get("truncated") else "", *_figures(sample)]
    texts = (_shortened(_text(sample.get(name)), longest) for name in _TEXT_FIELDS)
    name = " ".join(str(sample[key]) for key in ("set", "source") if sample.get(key))
    shown = reward if reward is not None and math.isfinite(reward) else None
    return [sample["kind"], sample["step"], name, shown, " | ".join(filter(None, words)), *texts]


def _figures(sample: dict[str, Any]) -> Iterator[str]:
    """Parts of the reward, and the advantage."""
    parts = sample.get("parts")
    for name, value in parts.items() if isinstance(parts, dict) else ():
        if number(value) is not None:
            yield f"{name} {value:.4g}"
    if number(sample.get("advantage")) is not None:
        yield f"advantage {sample['advantage']:.4g}"


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
