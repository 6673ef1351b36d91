"""Pool of worker processes, run by a thread that assigns calls, enforces time limits and replaces workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any, Generic, TypeVar

import psutil

from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.rewards.calls import Entry, Failure, Retired

_START_SECONDS = 300.0  # limit for importing the functions' modules
_REPLACED_SECONDS = 300.0  # limit for replacing a worker that was ended
_LOOK_SECONDS = 0.5
_LATE_SECONDS = 0.5
_MOST_LOST_STARTS = 3  # consecutive, per worker, of functions that were imported before
_MOST_AT_ONCE = 16  # calls per message to a worker
# Sets the parent's module search path before anything is imported.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhpc.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)

T = TypeVar("T")
CallId = tuple[int, int]  # the caller's key, the index of the entry


@dataclass(frozen=True)
class PoolCall:
    """One call of an entry; ``keywords`` is passed to the function that the entry's loader returned.

    Calls with the same ``home`` go to the same worker as long as it lives; ``last`` marks the final one.
    """

    id: CallId
    keywords: Any
    home: int | None = None
    last: bool = False


class _Worker:
    """A process and the calls assigned to it, of which it executes the first."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        theirs_in, self._out = Pipe(duplex=False)
        self.inbox, theirs_out = Pipe(duplex=False)
        descriptors = (theirs_in.fileno(), theirs_out.fileno())
        # Not a mere fork: this process has threads, and may use a GPU. The worker inherits folder and environment.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, (os.getpid(), *descriptors))],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
        theirs_in.close()
        theirs_out.close()
        self.calls: deque[PoolCall] = deque()
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        with contextlib.suppress(BrokenPipeError):  # handled like any other end of a worker
            self._out.send(list(entries))

    def assign(self, calls: Sequence[PoolCall]) -> None:
        """Sends calls; only to an idle worker, which is reading, so that the pipe cannot be full."""
        self.calls.extend(calls)
        with contextlib.suppress(BrokenPipeError):
            self._out.send([(call.id[1], call.keywords) for call in calls])

    def end(self) -> int:
        """Kills the process and its children; returns its exit code."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            process.send_signal(signal.SIGSTOP)  # so that it starts no more children
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        self.process.kill()
        return self.reap()

    def reap(self) -> int:
        """Closes the pipes to a process that has ended; returns its exit code."""
        self._out.close()
        self.inbox.close()
        return self.process.wait()


class Pool(Generic[T]):
    """Calls functions in at most ``workers`` processes, which are started on demand.

    ``T`` is what the entries' functions return unless they fail. ``time_limit``: seconds per call of an entry without
    its own.
    """

    def __init__(self, entries: Sequence[Entry], workers: int, time_limit: float) -> None:
        self._entries, self._most = entries, workers
        self._limits = [time_limit if e.time_limit_seconds is None else e.time_limit_seconds for e in entries]
        self._queue: deque[PoolCall] = deque()
        self._homes: dict[int, _Worker] = {}
        self._outcomes: dict[CallId, T | Failure] = {}
        self._open = 0  # calls without an outcome
        self._seen = (0, 0.0)  # how many of them there were last, and since when
        self._workers: list[_Worker] = []
        self._started = False
        self._lost_starts = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._bell, self._button = os.pipe()
        os.set_blocking(self._button, False)
        # The kernel kills a worker when the thread that started it ends, so one thread starts them all.
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def wait_until_started(self) -> None:
        """Waits until one worker has imported the functions; a UserError if it cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error is not None)
        self._raise_error()

    def submit(self, calls: Sequence[PoolCall]) -> None:
        """Queues calls; returns immediately."""
        with self._changed:
            self._queue.extend(calls)
            self._open += len(calls)
        self._ring()

    def outcomes(self) -> dict[CallId, T | Failure]:
        """Outcomes that were not returned before, of all calls submitted so far; waits for them."""
        with self._changed:
            while self._open and self._error is None:
                if self._advances():
                    touch("score")
                self._changed.wait(1.0)
            done, self._outcomes = self._outcomes, {}
        self._raise_error()
        return done

    def ready(self) -> dict[CallId, T | Failure]:
        """Outcomes that arrived and were not returned before; does not wait."""
        with self._changed:
            done, self._outcomes = self._outcomes, {}
        self._raise_error()
        return done

    def advances(self) -> bool:
        """True if calls are open, of which none exceeds its limit. For a rank that does not wait in ``outcomes``."""
        with self._changed:
            return self._advances()

    def _advances(self) -> bool:
        """A slow call within its limit is not a hang of the rank that waits for it."""
        now = time.monotonic()
        if self._open != self._seen[0]:
            self._seen = (self._open, now)
        return self._open > 0 and now - self._seen[1] <= max(self._limits) + _REPLACED_SECONDS

    def close(self) -> None:
        """Kills the workers; unfinished calls get no outcome. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ring()
        self._thread.join()
        os.close(self._bell)
        os.close(self._button)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            os.write(self._button, b"x")

    # ---- the thread

    def _run(self) -> None:
        try:
            self._start_worker()
            while not self._closed:
                self._assign()
                self._listen()
                self._expire()
        except BaseException as error:  # raised by the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for worker in self._workers:
                worker.end()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._entries))

    def _assign(self) -> None:
        """Assigns calls to idle workers, several at once if the queue is long."""
        for worker in self._workers:
            if worker.ready and not worker.calls:
                with self._changed:
                    calls = self._take(worker, min(_MOST_AT_ONCE, max(1, len(self._queue) // (2 * self._most))))
                if calls:
                    worker.assign(calls)
                    self._start_clock(worker)
        if self._queue and len(self._workers) < self._most and all(worker.ready for worker in self._workers):
            self._start_worker()

    def _start_clock(self, worker: _Worker) -> None:
        """Sets the deadline of the worker's first call."""
        worker.deadline = time.monotonic() + self._limits[worker.calls[0].id[1]]

    def _take(self, worker: _Worker, most: int) -> list[PoolCall]:
        """Removes from the queue the oldest calls that the worker may execute."""
        taken: list[PoolCall] = []
        passed: list[PoolCall] = []
        while self._queue and len(taken) < most:
            call = self._queue.popleft()
            at_home = call.home is None or self._homes.setdefault(call.home, worker) is worker
            (taken if at_home else passed).append(call)
        self._queue.extendleft(reversed(passed))
        return taken

    def _listen(self) -> None:
        """Waits for messages until the next deadline, and handles them."""
        before = time.monotonic()
        busy = [worker.deadline for worker in self._workers if worker.calls or not worker.ready]
        seconds = min(max(0.0, min(busy) - before), _LOOK_SECONDS) if busy else None
        readable = wait([self._bell, *(worker.inbox for worker in self._workers)], seconds)
        late = time.monotonic() - before - seconds if seconds is not None else 0.0
        if late > _LATE_SECONDS:  # this process and its workers were stopped, as when Slurm suspends a job
            for worker in self._workers:
                worker.deadline += late
        if self._bell in readable:
            os.read(self._bell, 1 << 16)
        for worker in [worker for worker in self._workers if worker.inbox in readable]:
            self._receive(worker)

    def _receive(self, worker: _Worker) -> None:
        """Handles all messages of a worker."""
        try:
            while worker.inbox.poll():
                message = worker.inbox.recv()
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, Retired):
                    return self._retire(worker)
                if worker.ready:
                    self._settle(worker, message)
                else:
                    worker.ready, self._lost_starts = True, 0
                    with self._changed:
                        self._started = True
                        self._changed.notify_all()
        except (EOFError, ConnectionResetError):
            self._replace(worker, _death(worker.reap()))

    def _settle(self, worker: _Worker, outcome: T | Failure) -> None:
        """Records the outcome of the worker's first call."""
        call = worker.calls.popleft()
        if worker.calls:
            self._start_clock(worker)
        with self._changed:
            self._outcomes[call.id] = outcome
            self._open -= 1
            if call.last and call.home is not None:
                self._homes.pop(call.home, None)
            if not self._open:
                self._changed.notify_all()

    def _expire(self) -> None:
        """Ends workers whose call exceeded its limit, unless its outcome has just arrived."""
        for worker in list(self._workers):
            if not (worker.calls or not worker.ready) or time.monotonic() < worker.deadline or worker.inbox.poll():
                continue
            worker.end()
            limit = self._limits[worker.calls[0].id[1]] if worker.calls else _START_SECONDS
            self._replace(worker, Failure("timeout", f"took more than {limit:g} s"))

    def _replace(self, worker: _Worker, failure: Failure) -> None:
        """Handles a worker's end: fails its first call, requeues the others."""
        self._forget(worker)
        if not worker.ready:
            self._lost_starts += 1
        if not worker.ready and (not self._started or self._lost_starts > _MOST_LOST_STARTS * self._most):
            paths = ", ".join(dict.fromkeys(entry.path for entry in self._entries))
            raise UserError(f"importing {paths} {failure.what}", where=self._entries[0].where, remedy="fix the module")
        if worker.calls:
            self._settle(worker, failure)
        self._requeue(worker.calls)

    def _retire(self, worker: _Worker) -> None:
        """Handles a worker that exited by itself between two calls."""
        worker.end()
        self._forget(worker)
        self._requeue(worker.calls)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._homes = {home: where for home, where in self._homes.items() if where is not worker}

    def _requeue(self, calls: Sequence[PoolCall]) -> None:
        """Requeues the calls of a worker that is gone; starts another one if there is work."""
        with self._changed:
            self._queue.extendleft(reversed(calls))
            waiting = bool(self._queue)
        if waiting or not self._workers:
            self._start_worker()


def _death(code: int) -> Failure:
    """The failure of a call whose worker ended with exit code ``code``; negative for a signal."""
    if code >= 0:
        return Failure("died", f"ended its process with exit code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    memory = ", perhaps because memory ran out" if name == "SIGKILL" else ""
    return Failure("died", f"ended its process by {name}{memory}")
