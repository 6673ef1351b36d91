"""Tools that profile this process, started and stopped around a step or a phase."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhpc.core.files import write_atomic
from rlhpc.core.profiles import NEEDS_CUDA
from rlhpc.core.shown import ShownOnly
from rlhpc.core.storage import NONE
from rlhpc.observe.profiles.index import TRACE
from rlhpc.observe.profiles.stacks import Stacks, find_py_spy

_MOST_EVENTS = 200_000  # allocations and frees that a snapshot shows


class ProfileTool(Protocol):
    """A tool writes files whose names begin with a stem. It may raise; the caller continues without it."""

    def start(self, stem: Path) -> None:
        """Begins to collect."""

    def stop(self) -> None:
        """Ends what ``start`` began; nothing if it failed."""

    def write(self) -> None:
        """Writes what was collected and is not yet on disk."""


class TorchTrace:
    """Chrome trace of operators, collectives and kernels by torch.profiler."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._collected: list[tuple[Path, Any]] = []

    def start(self, stem: Path) -> None:
        """See ``ProfileTool``."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        profile = torch.profiler.profile(activities=kinds)
        profile.__enter__()
        self._profile = profile
        self._collected.append((Path(f"{stem}{TRACE}"), profile))

    def stop(self) -> None:
        """See ``ProfileTool``."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)

    def write(self) -> None:
        """See ``ProfileTool``. PyTorch compresses a file whose name ends in gz."""
        collected, self._collected = self._collected, []
        for path, profile in collected:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp.gz")
            try:
                profile.export_chrome_trace(str(temporary))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


class MemorySnapshots:
    """Snapshots of PyTorch's memory on this GPU, with the allocations and frees since the start, for
    https://pytorch.org/memory_viz."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._always = False

    def watch(self, path: Callable[[], Path]) -> None:
        """Writes a snapshot at the first out-of-memory error, in any step: of the memory in use, with the stacks of its
        allocations."""
        self._always, done, guard = True, [], ShownOnly("the snapshot of an out-of-memory error")

        def dump(*_: object) -> None:
            if not done:
                done.append(True)
                with guard:  # within the allocator
                    file = path()
                    file.parent.mkdir(parents=True, exist_ok=True)
                    _snapshot(file)

        torch._C._cuda_attach_out_of_memory_observer(dump)
        self._rest()

    def start(self, stem: Path) -> None:
        """See ``ProfileTool``."""
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python")
        self._path = Path(f"{stem}.memory.pickle")

    def stop(self) -> None:
        """See ``ProfileTool``."""
        path, self._path = self._path, None
        if path is not None:
            try:
                _snapshot(path)
            finally:
                self._rest()

    def write(self) -> None:
        """See ``ProfileTool``."""

    def _rest(self) -> None:
        """Records between profiled steps only what a snapshot at an error needs."""
        if self._always:
            torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
        else:
            torch.cuda.memory._record_memory_history(enabled=None)


class CaptureRange:
    """Capture range of Nsight Systems, under which this rank was started (rlhpc.launch.worker.nsys).

    Nsight Systems makes a report of each range, at its end or when the rank ends; a note beside the profile names it.
    """

    def __init__(self, reports: Path) -> None:
        """``reports``: path of its reports without their numbers and suffix."""
        self._reports, self._number = reports, 0
        self._stem: Path | None = None

    def start(self, stem: Path) -> None:
        """See ``ProfileTool``."""
        torch.cuda.cudart().cudaProfilerStart()
        self._number += 1
        self._stem = stem

    def stop(self) -> None:
        """See ``ProfileTool``."""
        stem, self._stem = self._stem, None
        if stem is not None:
            torch.cuda.cudart().cudaProfilerStop()
            write_atomic(Path(f"{stem}.nsys.txt"), f"range {self._number} of {self._reports}*.nsys-rep\n", NONE)

    def write(self) -> None:
        """See ``ProfileTool``."""


def make_tools(names: Collection[str], reports: Path) -> dict[str, ProfileTool]:
    """Tools by name; nvtx has none, for its ranges come with those of phases and layers."""
    made: dict[str, Callable[[], ProfileTool]] = {
        "torch": TorchTrace,
        "memory": MemorySnapshots,
        "nsys": lambda: CaptureRange(reports),
        "py-spy": Stacks,
    }
    return {name: made[name]() for name in names if name in made}


def missing(tools: Collection[str]) -> str:
    """Reason for which this rank cannot use one of the tools; empty if it can use all."""
    on_gpu = [name for name in NEEDS_CUDA if name in tools]
    if on_gpu and not torch.cuda.is_available():
        return f"tools that need CUDA: {', '.join(on_gpu)}; this run is on CPUs, use torch or py-spy"
    if "py-spy" in tools and find_py_spy() is None:
        return "py-spy is not installed where the ranks run; pip install py-spy there"
    return ""


def _snapshot(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.cuda.memory._dump_snapshot(str(temporary))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
