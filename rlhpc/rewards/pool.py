"""Workers that score, and the thread of this process that gives them work, watches their time and replaces them."""

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
from typing import Any

import psutil

from rlhpc.core.errors import UserError
from rlhpc.core.heartbeat import touch
from rlhpc.rewards.calls import Entry, Failure, Outcome, Retired

_START_SECONDS = 300.0  # for the functions' modules to be imported
_REPLACED_SECONDS = 300.0  # for another worker to take the place of one that was ended
_LOOK_SECONDS = 0.5
_LATE_SECONDS = 0.5
_MOST_LOST_STARTS = 3  # per worker and in a row, of functions that have been imported before
_MOST_AT_ONCE = 16  # calls in a message to a worker
# The parent's search path, for the modules that it can import. Nothing else may come before.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhpc.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)

CallId = tuple[int, int]  # a response's key, the index of the function


@dataclass(frozen=True)
class Call:
    """One response for one function; ``keywords`` is what the entry's loader makes a function of.

    Calls of one ``home`` go to the same worker for as long as it lives; after the ``last`` there is no other.
    """

    id: CallId
    keywords: Any
    home: int | None = None
    last: bool = False


class _Worker:
    """A process, and the calls that it has been given, the first of them being under way."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        theirs_in, self._out = Pipe(duplex=False)
        self.inbox, theirs_out = Pipe(duplex=False)
        descriptors = (theirs_in.fileno(), theirs_out.fileno())
        # Not forked alone: this process has threads, and may have a GPU. Its folder and environment are the worker's.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, (os.getpid(), *descriptors))],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
        theirs_in.close()
        theirs_out.close()
        self.calls: deque[Call] = deque()
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS
        with contextlib.suppress(BrokenPipeError):  # its end is seen like any other
            self._out.send(list(entries))

    def give(self, calls: Sequence[Call]) -> None:
        """Only when it has none: it is reading then, so that the pipe cannot be full."""
        self.calls.extend(calls)
        with contextlib.suppress(BrokenPipeError):
            self._out.send([(call.id[1], call.keywords) for call in calls])

    def end(self) -> int:
        """Kill it and what it has started; its exit code."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            process.send_signal(signal.SIGSTOP)  # it starts nothing more
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        self.process.kill()
        return self.gone()

    def gone(self) -> int:
        """Close what leads to a process that has ended; its exit code."""
        self._out.close()
        self.inbox.close()
        return self.process.wait()


class Pool:
    """Calls functions in at most ``workers`` processes, started when there is work for them.

    ``time_limit``: seconds per call of an entry without a limit of its own.
    """

    def __init__(self, entries: Sequence[Entry], workers: int, time_limit: float) -> None:
        self._entries, self._most = entries, workers
        self._limits = [time_limit if e.time_limit_seconds is None else e.time_limit_seconds for e in entries]
        self._queue: deque[Call] = deque()
        self._homes: dict[int, _Worker] = {}
        self._outcomes: dict[CallId, Outcome] = {}
        self._open = 0  # calls without an outcome
        self._workers: list[_Worker] = []
        self._started = False
        self._lost_starts = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._bell, self._button = os.pipe()
        os.set_blocking(self._button, False)
        # The kernel ends a worker with the thread that started it: this one, which stays.
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def wait_until_started(self) -> None:
        """Until one worker has imported the functions; a UserError if it cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error is not None)
        self._raise_error()

    def submit(self, calls: Sequence[Call]) -> None:
        """Returns at once."""
        with self._changed:
            self._queue.extend(calls)
            self._open += len(calls)
        self._ring()

    def outcomes(self) -> dict[CallId, Outcome]:
        """Wait for all calls submitted since the last time."""
        with self._changed:
            left, since = -1, 0.0
            while self._open and self._error is None:
                if self._open != left:
                    left, since = self._open, time.monotonic()
                # A call that takes its time is no hang of this rank, as long as it is within its limit.
                if time.monotonic() - since <= max(self._limits) + _REPLACED_SECONDS:
                    touch("score")
                self._changed.wait(1.0)
            done, self._outcomes = self._outcomes, {}
        self._raise_error()
        return done

    def ready(self) -> dict[CallId, Outcome]:
        """What has come since the last time, without waiting."""
        with self._changed:
            done, self._outcomes = self._outcomes, {}
        self._raise_error()
        return done

    def close(self) -> None:
        """Kill the workers; calls under way have no outcome. A second time does nothing."""
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
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._button, b"x")

    # ---- the thread

    def _run(self) -> None:
        try:
            self._start_worker()
            while not self._closed:
                self._assign()
                self._listen()
                self._expire()
        except BaseException as error:  # told by whoever waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for worker in self._workers:
                worker.end()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._entries))

    def _assign(self) -> None:
        """Give calls to workers that have none; where the queue is long, several at once."""
        for worker in self._workers:
            if worker.ready and not worker.calls:
                with self._changed:
                    calls = self._take(worker, min(_MOST_AT_ONCE, max(1, len(self._queue) // (2 * self._most))))
                if calls:
                    worker.give(calls)
                    self._start_clock(worker)
        if self._queue and len(self._workers) < self._most and all(worker.ready for worker in self._workers):
            self._start_worker()

    def _start_clock(self, worker: _Worker) -> None:
        """For the first of the worker's calls."""
        worker.deadline = time.monotonic() + self._limits[worker.calls[0].id[1]]

    def _take(self, worker: _Worker, most: int) -> list[Call]:
        """The oldest calls of the queue that the worker may have."""
        taken: list[Call] = []
        passed: list[Call] = []
        while self._queue and len(taken) < most:
            call = self._queue.popleft()
            at_home = call.home is None or self._homes.setdefault(call.home, worker) is worker
            (taken if at_home else passed).append(call)
        self._queue.extendleft(reversed(passed))
        return taken

    def _listen(self) -> None:
        """Until something is said, or a worker's time is over."""
        before = time.monotonic()
        busy = [worker.deadline for worker in self._workers if worker.calls or not worker.ready]
        seconds = min(max(0.0, min(busy) - before), _LOOK_SECONDS) if busy else None
        said = wait([self._bell, *(worker.inbox for worker in self._workers)], seconds)
        late = time.monotonic() - before - seconds if seconds is not None else 0.0
        if late > _LATE_SECONDS:  # this process was stopped, as Slurm does to suspend a job, and its workers with it
            for worker in self._workers:
                worker.deadline += late
        if self._bell in said:
            os.read(self._bell, 1 << 16)
        for worker in [worker for worker in self._workers if worker.inbox in said]:
            self._hear(worker)

    def _hear(self, worker: _Worker) -> None:
        """Take all that a worker has said."""
        try:
            while worker.inbox.poll():
                word = worker.inbox.recv()
                if isinstance(word, UserError):
                    raise word
                if isinstance(word, Retired):
                    return self._retire(worker)
                if worker.ready:
                    self._settle(worker, word)
                else:
                    worker.ready, self._lost_starts = True, 0
                    with self._changed:
                        self._started = True
                        self._changed.notify_all()
        except (EOFError, ConnectionResetError):
            self._replace(worker, _death(worker.gone()))

    def _settle(self, worker: _Worker, outcome: Outcome) -> None:
        """The worker's first call has come to this; it is at the next one now."""
        call = worker.calls.popleft()
        if worker.calls:
            self._start_clock(worker)
        with self._changed:
            self._outcomes[call.id] = outcome
            self._open -= 1
            if call.last:
                self._homes.pop(call.home, None)
            if not self._open:
                self._changed.notify_all()

    def _expire(self) -> None:
        """End workers whose call takes too long, unless its outcome is there by now."""
        for worker in list(self._workers):
            if not (worker.calls or not worker.ready) or time.monotonic() < worker.deadline or worker.inbox.poll():
                continue
            worker.end()
            limit = self._limits[worker.calls[0].id[1]] if worker.calls else _START_SECONDS
            self._replace(worker, Failure("timeout", f"took more than {limit:g} s"))

    def _replace(self, worker: _Worker, failure: Failure) -> None:
        """A worker is gone, by its first call's fault; the others go back to the queue."""
        self._forget(worker)
        if not worker.ready:
            self._lost_starts += 1
        if not worker.ready and (not self._started or self._lost_starts > _MOST_LOST_STARTS * self._most):
            paths = ", ".join(dict.fromkeys(entry.path for entry in self._entries))
            raise UserError(f"importing {paths} {failure.what}", where=self._entries[0].where, remedy="mend the module")
        if worker.calls:
            self._settle(worker, failure)
        self._requeue(worker.calls)

    def _retire(self, worker: _Worker) -> None:
        """A worker has ended by itself, between two calls."""
        worker.end()
        self._forget(worker)
        self._requeue(worker.calls)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._homes = {home: where for home, where in self._homes.items() if where is not worker}

    def _requeue(self, calls: Sequence[Call]) -> None:
        """The calls of a worker that is gone; another one takes its place at once if there is work."""
        with self._changed:
            self._queue.extendleft(reversed(calls))
            waiting = bool(self._queue)
        if waiting or not self._workers:
            self._start_worker()


def _death(code: int) -> Failure:
    """A worker's end in words; ``code`` is negative for a signal."""
    if code >= 0:
        return Failure("died", f"ended its process with exit code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    memory = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return Failure("died", f"ended its process by {name}{memory}")
