"""Reads run folders for the page."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import Attempt
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.files import read_text
from rlhpc.core.folder import RunFolder
from rlhpc.core.storage import patiently
from rlhpc.observe.page.marks import KINDS, link, pack_marks, read_marks
from rlhpc.observe.page.numbers import (
    Numbers,
    Steps,
    bins_for,
    pack_curves,
    pack_distributions,
    pack_timeline,
    pack_times,
    read_steps,
)
from rlhpc.observe.page.tables import pack_placement, pack_settings, predicted_rows
from rlhpc.observe.page.texts import MOST_SAMPLES, Samples, longest_text, pack_samples, read_samples

MOST_SPANS = 80_000  # of all runs on the page
# Size at which long texts are cut, and what numbers and characters usually take, compressed and as base64.
_PAGE_BYTES, _BYTES_OF_NUMBER, _BYTES_OF_CHARACTER = 1_800_000, 2.7, 0.5
_LEAST_ROOM = 500_000  # characters
MOST_STEPS, _LEAST_OF_RUN, _MOST_OF_RUN = 300, 10, 200  # with histograms, of all runs and of one


@dataclass(frozen=True)
class RunData:
    """Data of a run. ``config`` is None, with the reason in ``problem``, if it cannot be loaded; ``tree``: its
    keys as they are in the folder, without secrets."""

    folder: RunFolder
    name: str
    steps: Steps
    samples: Samples
    attempt: Attempt | None
    tree: dict[str, Any]
    config: RunConfig | None
    problem: str


def page_data(folders: Sequence[RunFolder], base: Path, *, training: bool = True) -> tuple[dict[str, Any], Numbers]:
    """Texts and numbers of the page. Links are relative to the folder ``base``. ``training``: with the samples of
    training steps."""
    runs = [_read(folder, MOST_SAMPLES // len(folders), training=training) for folder in folders]
    numbers = Numbers()
    bins = bins_for(sum(len(run.steps.columns) for run in runs))
    packed = [_packed(run, numbers, bins, len(runs), base) for run in runs]
    room = (_PAGE_BYTES - _BYTES_OF_NUMBER * len(numbers)) / _BYTES_OF_CHARACTER
    longest = longest_text([sample for run in runs for sample in run.samples.found], max(_LEAST_ROOM, room))
    texts = {
        "written": time.time(),
        "kinds": KINDS,
        "runs": [{"name": name, **run} for name, run in zip(_names(runs), packed, strict=True)],
        "rows": [pack_samples(run.samples.found, longest) for run in runs],
        "settings": pack_settings([run.tree for run in runs]),
    }
    return texts, numbers


def _read(folder: RunFolder, most_samples: int, *, training: bool) -> RunData:
    known = attempts.folders(folder)
    attempt = None
    for newest in reversed(known):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            attempt = attempts.read_attempt(newest)
        if attempt is not None:
            break
    tree, config, problem = _config(folder)
    name = str(tree.get("name") or folder.path.name)
    samples = read_samples(folder, most_samples, training=training)
    steps = patiently(lambda: read_steps(folder.metrics), folder.metrics)
    return RunData(folder, name, steps, samples, attempt, tree, config, problem)


def _config(folder: RunFolder) -> tuple[dict[str, Any], RunConfig | None, str]:
    try:
        tree = yaml12.parse(read_text(folder.config), str(folder.config))
    except (OSError, ValueError, UserError) as error:
        return {}, None, one_line(str(error))
    if not isinstance(tree, dict):
        return {}, None, f"{folder.config} contains no keys"
    try:
        return tree, load_config(folder.config), ""
    except (OSError, UserError) as error:  # of another version, or without its secrets
        return tree, None, one_line(str(error))


def _names(runs: Sequence[RunData]) -> list[str]:
    """Names of the runs; those with equal names also have the part of their paths that differs."""
    names = [run.name for run in runs]
    common = os.path.commonpath([run.folder.path.parent for run in runs])
    return [
        name if names.count(name) == 1 else f"{name} ({run.folder.path.relative_to(common)})"
        for name, run in zip(names, runs, strict=True)
    ]


def _packed(run: RunData, numbers: Numbers, bins: int, runs: int, base: Path) -> dict[str, Any]:
    """One of ``runs`` runs for the page's scripts."""
    steps = run.steps
    most_steps = min(_MOST_OF_RUN, max(_LEAST_OF_RUN, MOST_STEPS // runs))
    rows, reason = [], run.problem
    placement = None
    if run.config is not None:
        rows, reason = predicted_rows(run.config, run.folder, steps, run.attempt)
        with contextlib.suppress(UserError):  # a layout that never ran
            placement = pack_placement(run.config, run.attempt, numbers)
    return {
        "folder": str(run.folder.path),
        "files": _files(run.folder, base),
        "totals": steps.totals,
        "done": {phase: int(column.steps[-1]) for phase, column in steps.times.items()},
        "began": steps.began,
        "last": max((column.values[-1] for column in steps.times.values()), default=None),
        "curves": pack_curves(steps, numbers, bins),
        "hours": pack_times(steps, numbers, bins),
        "marks": pack_marks(read_marks(run.folder, steps), base),
        "distributions": pack_distributions(run.folder.histograms, numbers, most_steps),
        "timeline": patiently(
            lambda: pack_timeline(run.folder.timeline, numbers, MOST_SPANS // runs), run.folder.timeline
        ),
        "placement": placement,
        "predicted": rows,
        "prediction": reason,
        "unread": run.samples.unread,
    }


def _files(folder: RunFolder, base: Path) -> list[list[str]]:
    """Titles and links of the run's main files that exist."""
    files = {
        "folder": folder.path,
        "config.yaml": folder.config,
        "metrics.jsonl": folder.metrics,
        "samples.jsonl": folder.samples,
        "report.txt": folder.report_text,
        "log of the job": folder.submission,
    }
    return [[title, link(path, base)] for title, path in files.items() if path.exists()]
