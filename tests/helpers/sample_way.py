"""Notes which files of rlhpc a sample passes in an RL step: those whose functions take or return one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import rlhpc
from rlhpc.api import Completion, PackedBatch, Prompt, Request, RewardResult, RunState, Sample
from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext
from rlhpc.sharding.placement import placement_of
from rlhpc.trainer.main import run_rank
from rlhpc.trainer.run import Run
from rlhpc.trainer.step import rl_step

ROOT = Path(rlhpc.__file__).parent
SAMPLES = (Prompt, Request, Completion, RewardResult, Sample, PackedBatch)


def step(run: Run, state: RunState) -> tuple[Any, list[Sample]]:
    """``train.step`` that traces the built-in step."""
    with noted(run.context):
        return rl_step(run, state)


def rank(context: RankContext) -> str | None:
    """Entry of a rank. One that generates traces all that it does."""
    info = context.info
    placement = placement_of(load_config(context.attempt.config), info.world_size)
    with noted(context) if placement.role_of(info.rank).name == "engines" else nullcontext():
        return run_rank(context)


@contextmanager
def noted(context: RankContext) -> Iterator[None]:
    """Adds the files to ``way-RANK.json`` in the run's folder."""
    found: set[str] = set()
    sys.setprofile(lambda frame, event, value: found.update(_file(frame, event, value)))
    try:
        yield
    finally:
        sys.setprofile(None)
        note = context.run.path / f"way-{context.info.job_rank}.json"
        found.update(json.loads(note.read_text()) if note.exists() else [])
        note.write_text(json.dumps(sorted(found)))


def _file(frame: FrameType, event: str, value: Any) -> Iterator[str]:
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
        return
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [value] if event == "return" else [frame.f_locals.get(name) for name in parameters]
    if any(map(_holds, values)):
        yield Path(code.co_filename).relative_to(ROOT).as_posix()


def _holds(value: Any) -> bool:
    """True for a sample, and for a container whose first item is one."""
    if isinstance(value, dict):
        value = list(value.values())[:1]
    if isinstance(value, list | tuple):
        return any(map(_holds, value[:2]))
    return isinstance(value, SAMPLES)
