"""Rank program that trains as usual and records the device memory in use in each phase."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhpc.core.context import RankContext
from rlhpc.core.files import read_json, write_json
from rlhpc.core.folder import RunFolder

_PERIOD_SECONDS = 0.05  # a sample takes half a millisecond
# Phases of a step, by phase of a rank's heartbeat.
_PHASES = {
    "weight sync": "weight sync",
    "rollout": "rollout",
    "generate": "rollout",
    "score": "rollout",
    "log_probs": "log-probs",
    "forward": "log-probs",
    "update": "update",
    "backward and forward": "update",
}
OTHER = "start"  # joining, loading, building the engine


@dataclass
class Peaks:
    """Maximum bytes by phase."""

    used: dict[str, int]  # of the whole device, other processes included, as its driver reports
    allocated: dict[str, int]  # by PyTorch


def run_rank(context: RankContext) -> str | None:
    """Run the trainer without a final checkpoint. On a GPU the first rank writes its peaks to the run folder."""
    from rlhpc.trainer import main

    sampler = _Sampler(context)
    if context.info.rank == 0:
        sampler.start()
    stopped = main.run_rank(context, saves_end=False)
    sampler.end(peaks_file(context.run))
    return stopped


def peaks_file(folder: RunFolder) -> Path:
    return folder.path / "peaks.json"


def read_peaks(folder: RunFolder) -> Peaks | None:
    """Peaks of a run; None on a CPU."""
    file = peaks_file(folder)
    return Peaks(**read_json(file)) if file.exists() else None


class _Sampler(threading.Thread):
    """Samples the device's memory in use."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(name="memory", daemon=True)
        self._context, self._over, self._peaks = context, threading.Event(), Peaks({}, {})

    def run(self) -> None:
        import torch

        from bench.acceptance.device import opened, used_by

        with opened() as nvml:
            while nvml is not None and not self._over.wait(_PERIOD_SECONDS):
                if torch.cuda.is_initialized():  # by the rank, on its own device
                    self._note(used_by(nvml), torch.cuda.memory_allocated(self._context.info.local_rank))

    def end(self, file: Path) -> None:
        self._over.set()
        if self.is_alive():
            self.join()
        if self._peaks.used:
            write_json(file, asdict(self._peaks))

    def _note(self, used: int, allocated: int) -> None:
        phase = _PHASES.get(self._context.heartbeat.phase, OTHER)
        for peaks, value in ((self._peaks.used, used), (self._peaks.allocated, allocated)):
            peaks[phase] = max(peaks.get(phase, 0), value)
