"""Profiles the chosen steps of one rank."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhpc.core.files import write_json
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.profiles import Selection
from rlhpc.core.redaction import redact
from rlhpc.core.storage import NONE, patiently
from rlhpc.observe.profiles.index import prune, record_name
from rlhpc.observe.profiles.tools import MemorySnapshots, ProfileTool, make_tools

PREFIX = "rlhpc:"


class Ranges:
    """Nested ranges of one thread. ``nvtx``: as NVTX ranges too. None of its calls raises: hooks run within the model;
    ``error`` is the first failure, after which there are no ranges."""

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._open: list[Any] = []
        self._hooks: list[Any] = []
        self.error = ""

    def enter(self, name: str) -> None:
        """Begins a range."""
        if self.error:
            return
        try:
            span = torch.profiler.record_function(PREFIX + name)
            span.__enter__()
            self._open.append(span)
            if self._nvtx:
                torch.cuda.nvtx.range_push(PREFIX + name)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """Ends the newest range."""
        if not self._open:
            return
        try:
            self._open.pop().__exit__(None, None, None)
            if self._nvtx and not self.error:
                torch.cuda.nvtx.range_pop()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def attach(self, layers: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Makes a range of each forward pass of a layer, until ``detach``. Results stay the same."""
        for name, layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: self.enter(name)))
            self._hooks.append(layer.register_forward_hook(lambda *_: self.leave(), always_call=True))

    def detach(self) -> None:
        """Removes the ranges of layers, and ends those that are open."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        while self._open:
            self.leave()


_log = logging.getLogger(__name__)


class Profiled(Protocol):
    """Models that a rank computes with."""

    def layers(self) -> Iterable[tuple[str, Any]]:
        """Names and modules of its layers."""

    def settle(self) -> None:
        """Waits for the collectives in flight. One that began under PyTorch's profiler and ends after it would write
        its end into memory that the profiler has freed (ProcessGroupGloo.cpp, recordAsyncWorkProfilingInfo)."""


class Recorder:
    """Profiles of one rank, as a hook of the step's phases. Errors are warnings: the step continues without the tool.

    ``most_bytes``: maximum of all profiles of the run, half of it for the newest step.
    """

    def __init__(self, attempt: AttemptFolder, rank: int, most_bytes: int, profiled: Profiled) -> None:
        self._attempt, self._rank, self._most, self._profiled = attempt, rank, most_bytes, profiled
        self._tools: dict[str, ProfileTool] = {}
        self._selection = Selection(0, 0)
        self._step = 0
        self._running: Ranges | None = None
        self._entered: dict[str, int] = {}
        self._warnings: list[str] = []

    def watch_memory(self) -> None:
        """Writes a memory snapshot at an out-of-memory error, in any step."""
        with self._guard("memory"):
            memory = self._tool("memory")
            assert isinstance(memory, MemorySnapshots)
            memory.watch(lambda: self._folder / f"rank-{self._rank:05d}.out-of-memory.pickle")

    def passed(self, step: int) -> None:
        """Notes the running step, which need not be profiled."""
        self._step = step

    def begin(self, selection: Selection) -> None:
        """Begins the profile of the running step."""
        self._selection, self._entered, self._warnings = selection, {}, []
        with self._guard("files"):
            patiently(lambda: self._folder.mkdir(parents=True, exist_ok=True), self._folder, NONE)
            if self._rank == 0:
                prune(self._attempt.run, self._most // 2, self._step)
            for file in (self._folder / record_name(self._rank), *self._files()):  # of an earlier attempt
                file.unlink(missing_ok=True)
        self._running = Ranges(nvtx=bool({"nvtx", "nsys"} & set(selection.tools)))
        with self._guard("layers"):
            self._running.attach(self._profiled.layers())
        if not selection.phases:
            self._start(f"rank-{self._rank:05d}")

    def enter(self, phase: str) -> None:
        """See ``rlhpc.observe.metrics.PhaseHook``."""
        if phase in self._selection.phases:
            count = self._entered[phase] = self._entered.get(phase, 0) + 1
            self._start(f"rank-{self._rank:05d}.{phase}" + (f"-{count}" if count > 1 else ""))
        if self._running is not None:
            self._running.enter(phase)

    def leave(self, phase: str) -> None:
        """See ``rlhpc.observe.metrics.PhaseHook``."""
        if self._running is not None:
            self._running.leave()
        if phase in self._selection.phases:
            self._stop()

    def end(self) -> None:
        """Ends the profile: nothing is collected any more."""
        running, self._running = self._running, None
        if running is not None:
            running.detach()
            if running.error:
                self._warn(f"ranges: {running.error}")
        self._stop()

    def write(self, most_bytes: int) -> None:
        """Writes the files, and the record that names them. The largest files beyond ``most_bytes`` are not kept."""
        for name in self._selected():
            with self._guard(name):
                self._tools[name].write()
        with self._guard("files"):
            self._bound(most_bytes)
            record = {"step": self._step, "rank": self._rank, "time": time.time(), **self._selection.as_json()}
            names = sorted(file.name for file in self._files())
            write_json(
                self._folder / record_name(self._rank), {**record, "files": names, "warnings": self._warnings}, NONE
            )

    @property
    def _folder(self) -> Path:
        return self._attempt.run.profile(self._step)

    def _start(self, stem: str) -> None:
        for name in self._selection.tools:
            if name != "nvtx":
                with self._guard(name):
                    self._tool(name).start(self._folder / stem)

    def _stop(self) -> None:
        with self._guard("collectives"):
            self._profiled.settle()
        for name in reversed(self._selected()):
            with self._guard(name):
                self._tools[name].stop()

    def _selected(self) -> list[str]:
        """The step's tools that could be made."""
        return [name for name in self._selection.tools if name in self._tools]

    def _tool(self, name: str) -> ProfileTool:
        if name not in self._tools:
            self._tools |= make_tools([name], self._attempt.nsys_reports(self._rank))
        return self._tools[name]

    def _files(self) -> list[Path]:
        own = record_name(self._rank)
        return [file for file in self._folder.glob(f"rank-{self._rank:05d}.*") if file.name != own]

    def _bound(self, most_bytes: int) -> None:
        """Deletes the largest files until the others have at most ``most_bytes``."""
        sizes = {file: file.stat().st_size for file in self._files() if file.is_file()}
        for file in sorted(sizes, key=lambda path: -sizes[path]):
            if sum(sizes.values()) <= most_bytes:
                return
            share, size = most_bytes / 2**20, sizes.pop(file) / 2**20
            file.unlink(missing_ok=True)
            remedy = "choose profile.phases, fewer profile.ranks or a higher profile.max_mib"
            self._warn(f"{file.name} of {size:,.0f} MiB exceeds this rank's {share:,.0f} MiB and is not kept; {remedy}")

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Context that turns an exception into a warning; each text is logged once a step."""
        try:
            yield
        except Exception as error:
            self._warn(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _warn(self, text: str) -> None:
        if (known := redact(text)) not in self._warnings:
            self._warnings.append(known)
            _log.warning("profile of step %s: %s", self._step, known)
