"""Memory by phase, with fakes for the driver and torch.cuda."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.acceptance.grpo import OTHER, Peaks, Sampler, read_peaks
from rlhpc.config.load import load_config
from rlhpc.core.folder import RunFolder
from rlhpc.launch.runs.run import run_here
from tests.bench.acceptance.test_device import nvml
from tests.helpers.runs import records, write_config
from tests.helpers.waiting import until

pytestmark = pytest.mark.heavy
GIB = 1 << 30


def test_peaks_are_kept_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    used = [GIB]
    reads = SimpleNamespace(count=0)

    def memory(handle: int) -> SimpleNamespace:
        reads.count += 1
        return SimpleNamespace(used=used[0])

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetMemoryInfo=memory))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used[0] // 2)
    heartbeat = SimpleNamespace(phase="starting")
    sampler = Sampler(SimpleNamespace(info=SimpleNamespace(local_rank=0), heartbeat=heartbeat))  # type: ignore[arg-type]
    sampler.start()
    sizes = {"starting": 1, "weight sync": 2, "generate": 5, "score": 4, "backward and forward": 7}
    for phase, size in sizes.items():
        heartbeat.phase, used[0] = phase, size * GIB  # a sample in between sees the former size
        seen = reads.count
        until(lambda seen=seen: reads.count > seen + 2, "two more looks", seconds=60)
    sampler.end(tmp_path / "peaks.json")
    expected = {OTHER: GIB, "weight sync": 2 * GIB, "rollout": 5 * GIB, "update": 7 * GIB}
    halves = {phase: size // 2 for phase, size in expected.items()}
    assert read_peaks(RunFolder(tmp_path)) == Peaks(expected, halves)


def test_a_cpu_leaves_no_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    context = SimpleNamespace(info=SimpleNamespace(local_rank=0), heartbeat=SimpleNamespace(phase="starting"))
    sampler = Sampler(context)  # type: ignore[arg-type]
    sampler.start()
    sampler.end(tmp_path / "peaks.json")
    assert read_peaks(RunFolder(tmp_path)) is None


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_run_that_only_measures_saves_nothing_at_its_end(tmp_path: Path) -> None:
    file = write_config(tmp_path, train__steps=0, sft__steps=2, data__validation=[])
    config = load_config(file)
    assert run_here(config, entry="bench.acceptance.grpo:run_rank") == 0
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    assert not list(RunFolder(config.folder).checkpoints.glob("step-*"))
