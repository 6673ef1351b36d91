"""Profile of a rank's step: trace and table by torch.profiler, snapshot of GPU memory, range of Nsight Systems."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from rlhpc.core.files import write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import redact
from rlhpc.core.storage import NONE, patiently

_MOST_ALLOCATIONS = 200_000  # newest allocations and frees in a snapshot
_NAME_LETTERS = 80
# The table needs 50 µs and 6 kB of memory per event, the file 15 B: this rank would keep the others waiting.
_LARGEST_TRACE = 32 << 20

_log = logging.getLogger(__name__)


class StepProfile:
    """Profiles steps of one rank, as a hook of their phases. A tool that fails is a warning, and the step continues.

    ``settle`` waits for the collectives in flight. One that began under PyTorch's profiler and ends after it would
    write its end into memory that the profiler has freed (ProcessGroupGloo.cpp, recordAsyncWorkProfilingInfo).
    """

    def __init__(self, run: RunFolder, rank: int, tools: Collection[str], settle: Callable[[], None]) -> None:
        self._run, self._name, self._tools, self._settle = run, f"rank-{rank:05d}", tools, settle
        self._folder = run.profiles
        self._profile: Any = None
        self._ranges: list[contextlib.ExitStack] = []
        self._warned: set[str] = set()
        self._out_of_memory = False
        if "memory" in tools:
            with self._guard("memory"):
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")
                torch._C._cuda_attach_out_of_memory_observer(self._at_out_of_memory)

    def begin(self, step: int) -> None:
        """Begins to collect."""
        self._folder = self._run.profile(step)
        with self._guard("files"):
            patiently(lambda: self._folder.mkdir(parents=True, exist_ok=True), self._folder, NONE)
        if "torch" in self._tools:
            with self._guard("torch"):
                kinds = [torch.profiler.ProfilerActivity.CPU]
                kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
                profile = torch.profiler.profile(activities=kinds)
                profile.__enter__()
                self._profile = profile
        if "nsys" in self._tools:
            with self._guard("nsys"):
                torch.cuda.cudart().cudaProfilerStart()
        self.enter(f"step {step}")

    def enter(self, phase: str) -> None:
        """See ``rlhpc.observe.metrics.PhaseHook``."""
        self._ranges.append(stack := contextlib.ExitStack())
        with self._guard("ranges"):
            stack.enter_context(torch.profiler.record_function(f"rlhpc:{phase}"))
            if "nsys" in self._tools:
                stack.enter_context(torch.cuda.nvtx.range(f"rlhpc:{phase}"))

    def leave(self) -> None:
        """See ``rlhpc.observe.metrics.PhaseHook``."""
        with self._guard("ranges"):
            self._ranges.pop().close()

    def end(self) -> None:
        """Ends collecting."""
        self.leave()
        with self._guard("collectives"):
            self._settle()
        if self._profile is not None:
            with self._guard("torch"):
                self._profile.__exit__(None, None, None)
        if "nsys" in self._tools:
            with self._guard("nsys"):
                torch.cuda.cudart().cudaProfilerStop()
        if "memory" in self._tools:
            with self._guard("memory"):
                _snapshot(self._folder / f"{self._name}.memory.pickle")

    def write(self) -> None:
        """Writes the trace and its table. PyTorch compresses a file whose name ends in gz."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with self._guard("torch"):
            trace = self._folder / f"{self._name}.trace.json.gz"
            with _replaced(trace) as temporary:
                profile.export_chrome_trace(str(temporary))
            if trace.stat().st_size > _LARGEST_TRACE:
                raise ValueError(f"{trace} is too large for a table; open it with https://ui.perfetto.dev")
            column = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table = profile.key_averages().table(column, row_limit=-1, max_name_column_width=_NAME_LETTERS)
            write_atomic(self._folder / f"{self._name}.txt", table + "\n", NONE)

    def _at_out_of_memory(self, *_: object) -> None:
        """Writes a snapshot at the first out-of-memory error, called by the allocator."""
        if not self._out_of_memory:
            self._out_of_memory = True
            with self._guard("memory"):
                self._run.profiles.mkdir(parents=True, exist_ok=True)
                _snapshot(self._run.profiles / f"{self._name}.out-of-memory.pickle")

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Context that turns an exception into a warning; each text is logged once."""
        try:
            yield
        except Exception as error:
            text = redact(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if text not in self._warned:
                self._warned.add(text)
                _log.warning("profile: %s", text)


def _snapshot(path: Path) -> None:
    with _replaced(path) as temporary:
        torch.cuda.memory._dump_snapshot(str(temporary))


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Temporary file that takes the place of ``path`` if it was written."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
