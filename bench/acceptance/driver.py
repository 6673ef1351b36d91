"""Runs the parts of acceptance in order, resuming where an earlier invocation stopped. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from bench.acceptance.device import used_memory
from bench.acceptance.fingerprint import Fingerprint, read_fingerprint
from bench.acceptance.logs import LOG, append_log, last_lines
from bench.acceptance.page import page_name, render_page
from bench.acceptance.part import Figure, Part, Size, Skipped
from bench.acceptance.process import PartExit, run_part
from bench.acceptance.results import (
    STATE,
    FigureRecord,
    PartRecord,
    Results,
    SkippedRecord,
    Status,
    read_results,
    write_results,
)
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import write_atomic
from rlhpc.core.redaction import redact
from rlhpc.core.shown import show
from rlhpc.launch.machine import gpu_count

INTERRUPTED = 130
_NEEDS_GPU = "needs a GPU"
_RELEASE_SECONDS = 20.0  # for the GPU driver to free the memory of killed processes
_LEFT_BYTES = 1 << 30  # memory in use beyond that before the part which counts as not yet freed

Decision = Literal["run", "done", "failed", "no_gpu", "no_time"]


@dataclass(frozen=True)
class Options:
    """Options of one invocation."""

    names: tuple[str, ...] = ()  # default: all parts; a named part runs again in any case
    minutes: float | None = None  # a part starts only if its time limit still fits
    size: Size | None = None  # full with a GPU, tiny without
    retry: bool = False  # rerun failed parts
    strict: bool = False  # fail on a missed goal


def select(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The named parts in the table's order; all if no name is given. Raises UserError."""
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise UserError(f"no part {name!r}", where="--part", remedy=did_you_mean(name, known))
    return [part for part in parts if not names or part.name in names]


def decide(
    part: Part, record: PartRecord | None, options: Options, size: Size, *, on_gpu: bool, elapsed_minutes: float
) -> Decision:
    """What to do with a part. ``record``: its result in an earlier invocation."""
    if not options.names and record is not None:
        if record.status == "passed" and record.size in (size, "full"):
            return "done"
        if record.failed and not options.retry:
            return "failed"
    if part.needs_gpu and not on_gpu:
        return "no_gpu"
    if options.minutes is not None and elapsed_minutes + part.minutes > options.minutes:
        return "no_time"
    return "run"


def accept(folder: Path, parts: Sequence[Part], options: Options) -> int:
    """Run the parts that are not done, with results in ``folder``, and return the exit code.

    0: every selected part that ran has passed, now or earlier. 1: one failed or, with ``strict``, missed a goal.
    130: interrupted by Ctrl-C or SIGTERM; results so far are saved.
    """
    selected = select(parts, options.names)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        return Acceptance(folder, parts, selected, options).run()


class Acceptance:
    """One invocation of acceptance."""

    def __init__(self, folder: Path, parts: Sequence[Part], selected: Sequence[Part], options: Options) -> None:
        self._began = time.monotonic()
        self._folder, self._parts, self._chosen, self._options = folder, parts, selected, options
        self._results: Results = read_results(folder / STATE)
        gpus = gpu_count()
        self._on_gpu = gpus > 0
        self._size: Size = options.size or ("full" if self._on_gpu else "tiny")
        self._machine: Fingerprint = read_fingerprint(gpus)
        self._no_time: list[str] = []

    def run(self) -> int:
        """Run every selected part in turn and return the exit code."""
        show(f"rlhpc: acceptance on {self._machine.device}, {self._size} sizes: {self._folder}")
        for record in self._results.parts.values():
            if record.status == "running":  # its driver was killed
                record.status, record.message = "interrupted", "the driver was killed"
        code = 0
        with _sigterm_as_interrupt():
            try:
                for number, part in enumerate(self._chosen, 1):
                    self._take(part, f"[{number}/{len(self._chosen)}] {part.name}")
            except KeyboardInterrupt:
                code = INTERRUPTED
        self._save()
        return code or self._finish()

    def _take(self, part: Part, title: str) -> None:
        record = self._results.parts.get(part.name)
        elapsed = (time.monotonic() - self._began) / 60
        decision = decide(part, record, self._options, self._size, on_gpu=self._on_gpu, elapsed_minutes=elapsed)
        if decision == "done":
            show(f"{title}: passed before")
        elif decision == "failed":
            assert record is not None
            show(f"{title}: failed before ({record.message}); run it again with --retry or --part {part.name}")
        elif decision == "no_time":
            self._no_time.append(part.name)
            show(f"{title}: not started, its limit of {part.minutes:g} min exceeds the time left")
        elif decision == "no_gpu":
            show(f"{title}: skipped, {_NEEDS_GPU}")
            if record is None:  # keep what another machine measured
                self._begin(part).status = "skipped"
                self._results.parts[part.name].message = _NEEDS_GPU
                self._save()
        else:
            show(f"{title}: {part.title}, at most {part.minutes:g} min")
            self._run_part(part)

    def _begin(self, part: Part) -> PartRecord:
        """A new record, replacing an earlier one."""
        record = PartRecord.begin(part, self._size, self._machine.key, time.time())
        self._results.machines[self._machine.key] = self._machine
        self._results.parts[part.name] = record
        return record

    def _run_part(self, part: Part) -> None:
        record, began = self._begin(part), time.monotonic()
        self._save()

        def report(result: Figure | Skipped) -> None:
            if isinstance(result, Figure):
                figure = FigureRecord.of(result)
                record.add(figure)
                show(f"  {_line(figure)}")
            else:
                record.skipped.append(SkippedRecord.of(result))
                show(f"  {result.name}: skipped, {result.reason}")
            record.seconds = round(time.monotonic() - began, 1)
            self._save()

        memory = used_memory() if self._on_gpu else None
        with tempfile.TemporaryDirectory(prefix="rlhpc-acceptance-", ignore_cleanup_errors=True) as scratch:
            output = Path(scratch, "output.log")
            output.touch()
            try:
                ended = run_part(part, self._size, Path(scratch), output, report, on_gpu=self._on_gpu)
                record.status, record.message = _outcome(ended, record)
            except BaseException as error:
                stopped = isinstance(error, KeyboardInterrupt)
                record.status, record.message = "interrupted", "ended by a signal" if stopped else str(error)
                raise
            finally:
                record.seconds = round(time.monotonic() - began, 1)
                if record.status != "passed":
                    record.tail = [redact(line) for line in last_lines(output)]
                append_log(self._folder / LOG, f"{part.name}: {record.status}, {record.seconds} s", output)
                self._save()
        show(f"  {record.status} after {record.seconds:.0f} s" + (f": {record.message}" if record.message else ""))
        if memory is not None:
            _wait_for_memory(memory)

    def _save(self) -> None:
        """Write the state, then its page; remove a page under an earlier name."""
        if not self._results.parts:
            return
        before, self._results.page = self._results.page, page_name(self._results)
        write_results(self._folder / STATE, self._results)
        write_atomic(self._folder / self._results.page, render_page(self._results, self._parts))
        if before and before != self._results.page:
            (self._folder / before).unlink(missing_ok=True)

    def _finish(self) -> int:
        """Print failures, missed goals and skipped parts, and return the exit code."""
        names = [part.name for part in self._chosen]
        records = {name: self._results.parts[name] for name in names if name in self._results.parts}
        failed = [name for name, record in records.items() if record.failed]
        missed = [f"{name} ({figure.name})" for name, record in records.items() for figure in record.missed]
        for title, found in (("failed", failed), ("goals missed", missed), ("no time left for", self._no_time)):
            if found:
                show(f"rlhpc: {title}: {', '.join(found)}")
        if self._results.page:
            show(f"rlhpc: {self._folder / self._results.page}")
        return 1 if failed or (self._options.strict and missed) else 0


def _outcome(ended: PartExit, record: PartRecord) -> tuple[Status, str]:
    if ended.code is None:
        return "timeout", f"{ended.message} of {record.limit_minutes:g} min"
    if ended.code:
        return "failed", ended.message
    if not record.figures and not record.skipped:
        return "failed", "reported nothing"
    return "passed", ""


def _line(figure: FigureRecord) -> str:
    """A figure as a line for the terminal."""
    value = f"{figure.value:.4g}" if isinstance(figure.value, float) else str(figure.value)
    goal = f" (goal {figure.goal}: {'reached' if figure.met else 'MISSED'})" if figure.goal else ""
    return f"{figure.name}: {value} {figure.unit}".rstrip() + goal


def _wait_for_memory(before: int) -> None:
    """Wait until the GPU's memory use is back to ``before``, within a limit."""
    until = time.monotonic() + _RELEASE_SECONDS
    while (used_memory() or 0) > before + _LEFT_BYTES and time.monotonic() < until:
        time.sleep(0.5)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one driver per folder. The lock is on the log, which is never replaced, and ends with this process."""
    with open(folder / LOG, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another acceptance is running in this folder", where=str(folder), remedy="give another folder"
            ) from None
        yield


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle a scheduler's SIGTERM like Ctrl-C: results so far are saved."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
