"""Processes that have imported PyTorch and Megatron already, of which ranks are forked: seconds less for each rank.

There are two, with hash seeds of their own: ranks that go through a set in different orders must show. On a machine
with a GPU ranks start afresh, for CUDA does not survive a fork.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from rlhpc.core import env

_WARM = 2
# What the imports look at; the rest of a rank's environment is its own.
_FIXED = {env.OMP_NUM_THREADS: "1", env.TORCHDYNAMO_DISABLE: "1"}


def usable(environ: Mapping[str, str]) -> bool:
    """A rank of this environment is like one that starts afresh."""
    same = all(environ.get(name) == value for name, value in _FIXED.items())
    return same and not Path("/dev/nvidiactl").exists()


class Forked:
    """A rank, with what run_ranks needs of a Popen."""

    def __init__(self, folder: Path, rank: int, environ: Mapping[str, str]) -> None:
        self._warm = _warm(rank % _WARM)
        self.returncode: int | None = None
        self.pid = self._warm.fork(folder, rank, environ)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ended(0.0).get(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.returncode = self._warm.ended(1.0).get(self.pid)
        return self.returncode


class _Warm:
    """A process that forks on demand; it ends with ours, when there is nothing more to read."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm"],
            env={**os.environ, **_FIXED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        self._ended: dict[int, int] = {}
        self._rest = b""

    def fork(self, folder: Path, rank: int, environ: Mapping[str, str]) -> int:
        call = {"folder": str(folder), "rank": rank, "environ": dict(environ), "cwd": os.getcwd()}
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            word, pid, *code = self._line()
            if word == "started":
                return int(pid)
            self._ended[int(pid)] = int(code[0])

    def ended(self, seconds: float) -> dict[int, int]:
        """Exit codes by process; waits so long for another."""
        while b"\n" in self._rest or select.select([self._process.stdout], [], [], seconds)[0]:
            _, pid, code = self._line()
            self._ended[int(pid)], seconds = int(code), 0.0
        return self._ended

    def _line(self) -> list[str]:
        while b"\n" not in self._rest:
            more = os.read(self._process.stdout.fileno(), 4096)
            assert more, f"the process that forks ranks ended with {self._process.wait()}"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split()


@functools.cache
def _warm(number: int) -> _Warm:
    return _Warm()


def _serve() -> None:
    """Fork a rank for each line read, and say when one has ended. Without threads: a fork takes none along."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlhpc.trainer.build  # noqa: F401
    buffer, ranks = b"", set()
    while True:
        readable, _, _ = select.select([0], [], [], 0.02 if ranks else None)
        if readable:
            more = os.read(0, 1 << 16)
            if not more:
                os._exit(0)
            *lines, buffer = (buffer + more).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _become_rank(json.loads(line))
                ranks.add(pid)
                _say("started", pid)
        for pid in list(ranks):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ranks.remove(pid)
                _say("ended", pid, os.waitstatus_to_exitcode(status))


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _become_rank(call: dict) -> None:
    from tests.helpers.distributed import run_child

    folder = Path(call["folder"])
    os.setsid()
    log = os.open(folder / f"{call['rank']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, log, log)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(call["environ"])
    os.chdir(call["cwd"])
    run_child(folder)


if __name__ == "__main__":
    _serve()
