"""Exports the actor beside the run's checkpoints (checkpoint.export)."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from rlhpc.api import RunState, TrainBackend
from rlhpc.checkpoint.export import ExportPlan, plan_export, write_export
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.config.schema import RunConfig
from rlhpc.core.heartbeat import enter


class Exporter:
    """Writes the folders that ``checkpoint.export_at`` asks for, on rank 0 among those that train. ``last``: number of
    the run's last step, warm-up included. Collective."""

    def __init__(self, config: RunConfig, actor: TrainBackend, rank: int, store: CheckpointStore, last: int) -> None:
        self._actor, self._rank, self._store, self._last = actor, rank, store, last
        self._exported = -1  # by this attempt, or found
        self._section, model = config.checkpoint, config.model
        self._plan: ExportPlan | None = None
        if self._section.export == "hf":
            self._plan = plan_export(actor.tensors, model.path, model.dtype, rope_tokens=model.rope_tokens)

    def resume(self, state: RunState) -> None:
        """Exports the checkpoint that the run resumes from if that is due and an earlier attempt has not."""
        if self._is_due(state) and self._store.has_export(state.total_steps):
            self._exported = state.total_steps
        self.export(state)

    def export(self, state: RunState) -> float:
        """Exports the weights of a saved step, once and if that is due, in place of what an earlier attempt has
        exported there; returns the seconds that it took."""
        if state.total_steps == self._exported or not self._is_due(state):
            return 0.0
        began = time.monotonic()
        enter("exporting the model")
        self._store.export(state.total_steps, functools.partial(self._write, state.total_steps))
        self._exported = state.total_steps
        return time.monotonic() - began

    def _is_due(self, state: RunState) -> bool:
        at, step = self._section.export_at, state.total_steps
        return self._plan is not None and (
            step == self._last or at == "all" or (at == "best" and state.best_step == step)
        )

    def _write(self, step: int, folder: Path) -> None:
        assert self._plan is not None
        write_export(self._plan, None if self._rank else folder, self._actor.full_tensors(), step)
