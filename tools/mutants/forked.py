"""Runs a case in a process forked from this one, and measures it."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What a damaged input may need besides: codecs that bytes are guessed to be in.
_CODECS = ("utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be", "latin_1", "idna")
NOBODY = 65534
_CPU_SECONDS, _WALL_SECONDS, _BYTES = 30, 120, 4 * 2**30


@dataclass(frozen=True)
class Outcome:
    """End of a command: exit code (negative: a signal's number), its output, time and memory."""

    code: int
    text: str
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Running:
    pid: int
    output: int


def warm_up(calls: Sequence[Sequence[str]], folder: Path) -> None:
    """Imports what the calls import in the folder, and builds the schema that errors are described from."""
    names = {f"encodings.{codec}" for codec in _CODECS}
    for words in calls:
        names |= _modules_of(words, folder)
    for name in sorted(names):
        if name != "__main__" and not name.startswith("__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    from rlhpc.config.load import json_schema

    json_schema()


def _modules_of(words: Sequence[str], folder: Path) -> set[str]:
    """The modules that a call has imported in the end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        _call(words, folder, unprivileged=False)
        with open(write_end, "w", encoding="utf-8") as pipe:
            pipe.write("\n".join(name for name in sys.modules if not name.startswith(("mine", "tools."))))
        os._exit(0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        found = set(pipe.read().splitlines())
    os.waitpid(pid, 0)
    return found


def start(words: Sequence[str], folder: Path, *, unprivileged: bool) -> Running:
    """Starts ``rlhpc WORDS`` in the folder; as nobody, where this is root's process."""
    output = os.memfd_create("output")
    pid = os.fork()
    if not pid:
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            _limit()
            code = _call(words, folder, unprivileged=unprivileged)
        except BaseException:
            os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
            code = 1
        os._exit(code)
    return Running(pid, output)


def finish(running: Running, status: int, usage: resource.struct_rusage) -> Outcome:
    """The outcome of an ended process."""
    size = os.fstat(running.output).st_size
    text = os.pread(running.output, min(size, 1_000_000), 0).decode("utf-8", "replace")
    os.close(running.output)
    return Outcome(os.waitstatus_to_exitcode(status), text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_WALL_SECONDS)


def _call(words: Sequence[str], folder: Path, *, unprivileged: bool) -> int:
    from rlhpc.cli.main import main

    sys.stdin = open(os.devnull)  # noqa: SIM115 - until the process ends
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    for name in [name for name in os.environ if name.startswith(("RLHPC_", "SLURM_", "SBATCH_", "XDG_"))]:
        del os.environ[name]
    os.environ["HOME"] = str(folder)
    if unprivileged and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    os.chdir(folder)
    sys.argv = ["rlhpc", *words]
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code
