"""Metrics files of runs, written as rank 0 writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhpc.core.folder import RunFolder

SFT = 3


def new_run(path: Path) -> RunFolder:
    return RunFolder(path / "run").create()


def record(phase: str, step: int, began: float = 1000.0, **metrics: Any) -> dict[str, Any]:
    """The record of a step of an attempt that began at ``began``."""
    at = began + (0 if phase == "sft" else 100) + step + 0.25
    values = {"loss": 1.0 / (step + 1), "validation/pass@1": step / 1000, "perf/step_seconds": began / 1000}
    return {"phase": phase, "step": step, "total_steps": 9, "time": at, **values, **metrics}


def steps(sft: int, rl: int, began: float = 1000.0) -> list[dict[str, Any]]:
    """Records up to these steps; without any of RL if ``rl`` is negative."""
    return [record("sft", n, began) for n in range(1, sft + 1)] + [record("rl", n, began) for n in range(rl + 1)]


def append(folder: RunFolder, records: Iterable[dict[str, Any]]) -> None:
    with open(folder.metrics, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def replace(folder: RunFolder, records: Iterable[dict[str, Any]]) -> None:
    """As a resumed run does: a new file in the place of the old one."""
    new = folder.path / ".new"
    new.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    new.replace(folder.metrics)


def keys(records: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["phase"], one["step"]) for one in records]
