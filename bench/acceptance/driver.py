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
from typing import Literal

from bench.acceptance.machine import Fingerprint, read_fingerprint, used_memory
from bench.acceptance.page import page_name, render_page
from bench.acceptance.process import OutOfTime, WorkerCall, WorkerFailed, Workers, part_environment
from bench.acceptance.results import (
    STATE,
    Context,
    Figure,
    Part,
    PartRecord,
    Results,
    Size,
    Skipped,
    Status,
    read_results,
    write_results,
)
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.files import write_atomic
from rlhpc.core.process import oom_kills
from rlhpc.core.redaction import redact
from rlhpc.core.shown import show
from rlhpc.core.text import printable
from rlhpc.launch.machine import gpu_count

_HERE = "bench.acceptance"
# Most informative first.
PARTS = (
    Part("install", "Versions, imports and selected kernels", "first", 1.5, f"{_HERE}.install:run"),
    Part("correctness", "Training, weight sync and engine agree", "first", 5.0, f"{_HERE}.weights:run_correctness"),
    Part("weight_sync", "Weight sync, sleep and wake", "first", 2.5, f"{_HERE}.weights:run_sync"),
    Part("mfu_1_5b", "MFU of updates, 1.5B, all layers", "first", 2.0, f"{_HERE}.mfu:run_1_5b"),
    Part("mfu_8b", "MFU of updates, 8B, layers that fit", "first", 2.0, f"{_HERE}.mfu:run_8b", needs_gpu=True),
    Part("mfu_moe", "MFU of updates, 30B-A3B, layers that fit", "first", 1.5, f"{_HERE}.mfu:run_moe"),
    Part("mfu_fsdp", "MFU and memory of FSDP2, 1.5B, all layers", "first", 3.0, f"{_HERE}.mfu_peers:run_fsdp"),
    Part("mfu_peer", "The same update in transformers", "first", 2.0, f"{_HERE}.mfu_peers:run_peer"),
    Part("decode", "Decoding vs. stock vLLM", "first", 3.0, f"{_HERE}.decode:run"),
    Part("demo", "The demo learns", "first", 3.0, f"{_HERE}.runs:run_demo"),
    Part("grpo_1_5b", "GRPO steps vs. the plan, 1.5B, all layers", "rest", 6.5, f"{_HERE}.grpo:run_1_5b"),
    Part(
        "grpo_8b", "GRPO steps vs. the plan, 8B, layers that fit", "rest", 6.5, f"{_HERE}.grpo:run_8b", needs_gpu=True
    ),
    Part("several_ranks", "Parallel axes on several ranks", "rest", 4.0, f"{_HERE}.several_ranks:run"),
    Part("recovery", "Killed runs resume", "rest", 7.0, f"{_HERE}.runs:run_recovery"),
)
INTERRUPTED = 130
LOG = "acceptance.log"  # in the folder of results
_HEAD, _TAIL = 128 << 10, 384 << 10  # bytes of output stored per part
_WHOLE = 12 << 20  # bytes stored in total; the oldest are dropped first
_TAIL_LINES, _LINE_CHARACTERS = 40, 400  # of output on the page
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
    """Decision on a part. ``record``: its result in an earlier invocation."""
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
        show(f"acceptance on {self._machine.device}, {self._size} sizes: {self._folder}")
        for record in self._results.parts.values():
            if record.status == "running":  # its driver was killed
                record.status, record.message = "interrupted", "the driver was killed"
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's, like Ctrl-C
        try:
            for number, part in enumerate(self._chosen, 1):
                self._take(part, f"[{number}/{len(self._chosen)}] {part.name}")
            return self._finish()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
            self._save()

    def _take(self, part: Part, title: str) -> None:
        record = self._results.parts.get(part.name)
        elapsed = (time.monotonic() - self._began) / 60
        decision = decide(part, record, self._options, self._size, on_gpu=self._on_gpu, elapsed_minutes=elapsed)
        shown = {
            "done": "passed before",
            "failed": f"failed before ({record and record.message}); run it again with --retry or --part {part.name}",
            "no_time": f"not started, its limit of {part.minutes:g} min exceeds the time left",
            "no_gpu": f"skipped, {_NEEDS_GPU}",
            "run": f"{part.title}, at most {part.minutes:g} min",
        }
        show(f"{title}: {shown[decision]}")
        if decision == "no_time":
            self._no_time.append(part.name)
        elif decision == "no_gpu" and record is None:  # keep what another machine measured
            self._begin(part, "skipped", _NEEDS_GPU)
        elif decision == "run":
            self._run_part(part, self._begin(part, "running"))

    def _begin(self, part: Part, status: Status, message: str = "") -> PartRecord:
        """A new record, replacing an earlier one."""
        record = PartRecord(
            **{"title": part.title, "tier": part.tier, "size": self._size, "machine": self._machine.key},
            **{"status": status, "message": message, "started": time.time(), "limit_minutes": part.minutes},
        )
        self._results.machines[self._machine.key] = self._machine
        self._results.parts[part.name] = record
        self._save()
        return record

    def _run_part(self, part: Part, record: PartRecord) -> None:
        began = time.monotonic()

        def report(result: Figure | Skipped) -> None:
            if isinstance(result, Figure):
                record.add(result)
                show(f"  {_line(result)}")
            else:
                record.skipped.append(result)
                show(f"  {result.name}: skipped, {result.reason}")
            record.seconds = round(time.monotonic() - began, 1)
            self._save()

        memory = used_memory() if self._on_gpu else None
        with tempfile.TemporaryDirectory(prefix="rlhpc-acceptance-", ignore_cleanup_errors=True) as scratch:
            context = Context(Path(scratch, "work"), self._size, self._on_gpu, report, log=lambda text: None)
            output = context.folder / f"{part.name}.log"
            try:
                record.status, record.message = run_part(part, context, Path(scratch))
                if record.status == "passed" and not record.figures and not record.skipped:
                    record.status, record.message = "failed", "reported nothing"
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
        write_atomic(self._folder / self._results.page, render_page(self._results, self._parts, LOG))
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
                show(f"{title}: {', '.join(found)}")
        if self._results.page:
            show(str(self._folder / self._results.page))
        return 1 if failed or (self._options.strict and missed) else 0


def run_part(part: Part, context: Context, scratch: Path) -> tuple[Status, str]:
    """Run a part within its limit; its status, and the reason that it did not pass. No process of it is left, even if
    this raises."""
    deadline, oom_before = time.monotonic() + 60 * part.minutes, oom_kills()
    environment = part_environment(scratch, on_gpu=context.on_gpu)
    status: Status = "passed"
    message = ""
    with Workers(context, WorkerCall(part.name, part.function), environment, deadline) as workers:
        workers.go()
        try:
            workers.finish()
        except OutOfTime:
            status, message = "timeout", f"exceeded its limit of {part.minutes:g} min"
        except WorkerFailed as error:
            status, message = "failed", str(error)
    if message and oom_kills() > oom_before:
        message += "; the kernel's OOM killer ended a process"
    return status, message


def _line(figure: Figure) -> str:
    """A figure as a line for the terminal."""
    value = f"{figure.value:.4g}" if isinstance(figure.value, float) else str(figure.value)
    goal = f" (goal {figure.goal}: {'reached' if figure.met else 'MISSED'})" if figure.goal else ""
    return f"{figure.name}: {value} {figure.unit}".rstrip() + goal


def _wait_for_memory(before: int) -> None:
    """Wait until the GPU's memory use is back to ``before``, within a limit."""
    until = time.monotonic() + _RELEASE_SECONDS
    while (used_memory() or 0) > before + _LEFT_BYTES and time.monotonic() < until:
        time.sleep(0.5)


def append_log(log: Path, title: str, output: Path) -> None:
    """Append a part's output, without its middle if it is long. Edits the file in place, because it is locked."""
    data = output.read_bytes() if output.exists() else b""
    if (left_out := len(data) - _HEAD - _TAIL) > 0:
        data = data[:_HEAD] + f"\n... {left_out:,} bytes left out ...\n".encode() + data[-_TAIL:]
    with open(log, "r+b") as file:
        data = (file.read() + f"\n===== {title} =====\n".encode() + data)[-_WHOLE:]
        file.seek(0)
        file.write(data)
        file.truncate()


def last_lines(output: Path) -> list[str]:
    """Last lines of a part's output, for the page."""
    text = output.read_bytes()[-_TAIL_LINES * _LINE_CHARACTERS :] if output.exists() else b""
    return [printable(line)[:_LINE_CHARACTERS] for line in text.decode(errors="replace").splitlines()[-_TAIL_LINES:]]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one driver per folder. The lock is on the log, which is never replaced, and ends with this process."""
    with open(folder / LOG, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "give another folder"
            raise UserError("another acceptance is running in this folder", where=str(folder), remedy=remedy) from None
        yield
