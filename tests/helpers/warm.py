"""Warm processes, which have imported what a test's processes need and fork them, saving seconds for each.

There are two kinds. The ``light`` process has imported what the launcher needs, without torch; a ``heavy`` one PyTorch,
Megatron and vLLM, which takes ten seconds of CPU time. Two heavy ones have different hash seeds, to detect ranks that
iterate over a set in different orders. On a machine with a GPU, where CUDA does not survive a fork, and with
``--fresh-processes``, every process starts from scratch.

Runs use the same processes through ``python()``: a stand-in for the interpreter that forks `python -m MODULE` for the
modules of _KINDS, and executes the real interpreter for everything else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhpc.core import env
from tests.helpers import session, stranger, warm_client

ROOT = Path(__file__).parents[2]
INTERPRETER = sys.executable
# Warm processes that fork a module; ranks alternate between the two heavy ones.
_KINDS = {
    "rlhpc.cli.main": ("light",),
    "rlhpc.observe.trackers": ("light",),
    "bench.acceptance.worker": ("heavy-0", "heavy-1"),
    "rlhpc.launch.worker.main": ("heavy-0", "heavy-1"),
    "tests.helpers.distributed": ("heavy-0", "heavy-1"),
    "tests.launch.hanging": ("heavy-0", "heavy-1"),
}
# Variables that imports read; a forked process has its own values of all others.
_FIXED = {env.TORCHDYNAMO_DISABLE: "1"}
_HEAVY = "heavy"
_MODULES = {
    "light": (
        "rlhpc.launch.runs.derived_runs",
        "rlhpc.launch.runs.run",
        "rlhpc.observe.page.document",
        "tensorboard.summary.writer.event_file_writer",
    ),
    _HEAVY: (
        "rlhpc.trainer.build",
        "rlhpc.trainer.fsdp_models",
        "rlhpc.trainer.loop",
        "rlhpc.trainer.megatron_models",
        "rlhpc.trainer.evaluate",
        "rlhpc.observe.report",
        "rlhpc.rollout.vllm_cpu",
        "rlhpc.rollout.vllm_engine",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.tokenization_utils_tokenizers",
        "vllm.v1.engine.llm_engine",
        *(
            f"vllm.model_executor.models.{name}"
            for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2")
        ),
    ),
}
# Ignored by every Python process, so not inherited from the requester.
_PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}


def usable(environ: Mapping[str, str]) -> bool:
    """True if a rank forked for this environment equals one started from scratch."""
    same = all(environ.get(name) == value for name, value in _FIXED.items())
    return same and not session.all_fresh and not Path("/dev/nvidiactl").exists()


class Forked:
    """A forked ``python -m module arguments``, with the part of Popen that run_ranks uses."""

    def __init__(
        self, module: str, arguments: Sequence[str], number: int, environ: Mapping[str, str], log: int
    ) -> None:
        kinds = _KINDS[module]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(_zygote(kinds[number % len(kinds)])))
        with open(os.devnull) as nothing:
            warm_client.ask(
                self._connection,
                {"module": module, "arguments": list(arguments), "environ": dict(environ), "session": True},
                {0: nothing.fileno(), 1: log, 2: log},
            )
        self.returncode: int | None = None
        self.pid = warm_client.read_number(self._connection)

    def poll(self) -> int | None:
        return self._read(0.0)

    def wait(self) -> int:
        while self._read(1.0) is None:
            pass
        assert self.returncode is not None
        return self.returncode

    def _read(self, seconds: float) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(seconds):
                    self.returncode = warm_client.read_number(self._connection)
                    self._connection.close()
        return self.returncode


@functools.cache
def python() -> Path:
    """Executable that replaces ``sys.executable`` in runs."""
    if session.all_fresh or Path("/dev/nvidiactl").exists():
        return Path(INTERPRETER)
    for kind in {kind for kinds in _KINDS.values() for kind in kinds}:
        _zygote(kind)
    return _folder() / "python"


def servers() -> list[int]:
    """Process ids of the warm processes."""
    return [server.pid for server in _servers.values() if server.poll() is None]


def await_imports() -> None:
    """Wait until the warm processes have imported what they fork."""
    for kind, server in _servers.items():
        while not _imported(_folder(), kind).exists() and server.poll() is None:
            time.sleep(0.02)


def _imported(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.imported"


@functools.cache
def _folder() -> Path:
    """Folder of the stand-in for the interpreter and of sockets, whose paths have at most 107 bytes."""
    folder = tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")
    atexit.register(folder.cleanup)
    source = Path(warm_client.__file__).read_text(encoding="utf-8")
    call = f"main({INTERPRETER!r}, {folder.name!r}, {_KINDS!r}, {_FIXED!r})"
    file = Path(folder.name, "python")
    file.write_text(f"#!{INTERPRETER} -IS\n{source}\n{call}\n")
    file.chmod(0o755)
    Path(folder.name).chmod(0o755)  # for other users in tests, for whom the stand-in executes the interpreter
    return Path(folder.name)


@functools.cache
def _zygote(kind: str) -> Path:
    """Start a warm process, which ends with this one through a pipe; returns its listening socket."""
    path = _folder() / kind
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, False)
    environ = {
        **os.environ,
        **_FIXED,
        env.OMP_NUM_THREADS: "1",  # on import, libraries start a thread per further core
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    _servers[kind] = subprocess.Popen(
        [INTERPRETER, "-m", "tests.helpers.warm", kind, str(listener.fileno()), str(_folder() / "python")],
        env=environ,
        stdin=read_end,
        pass_fds=[listener.fileno()],
        start_new_session=True,
        cwd=ROOT,
    )
    os.close(read_end)
    listener.close()
    _write_ends.append(write_end)
    return path


_write_ends: list[int] = []
_servers: dict[str, subprocess.Popen[bytes]] = {}


def _serve(kind: str, listener: socket.socket, folder: Path) -> dict[str, Any] | None:
    """Fork a child per request and report its exit code. Returns only in children, with their request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import(kind)
    _imported(folder, kind).touch()
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"threads do not survive a fork: {threads}, {threading.enumerate()}"
    children: dict[int, socket.socket] = {}
    while True:
        readable = _wait([0, listener.fileno(), *(c.fileno() for c in children.values())], 0.02 if children else None)
        if 0 in readable:  # the tests have ended or were killed
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listener.fileno() in readable:
            connection, _ = listener.accept()
            request, descriptors = warm_client.receive(connection)
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                for other in children.values():
                    other.close()
                _become(request, descriptors)
                return request
            for descriptor in descriptors.values():
                os.close(descriptor)
            warm_client.write_number(connection, pid)
            children[pid] = connection
        _report(children, readable)


def _wait(descriptors: list[int], seconds: float | None) -> set[int]:
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(seconds)}


def _report(children: dict[int, socket.socket], readable: set[int]) -> None:
    """Send exit codes of ended children; kill a child whose client is gone."""
    for pid, connection in list(children.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and connection.fileno() in readable:
            os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0)
        if done:
            del children[pid]
            with contextlib.suppress(OSError):
                warm_client.write_number(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def _import(kind: str) -> None:
    names = _MODULES["light"] + (_MODULES[_HEAVY] if kind.startswith(_HEAVY) else ())
    for name in names:
        importlib.import_module(name)
    if kind.startswith(_HEAVY):  # to inspect a model without a cache, vLLM would import all this again in a new process
        sys.modules["vllm.model_executor.models.registry"]._run_in_subprocess = lambda inspect: inspect()
    gc.collect()
    gc.freeze()  # garbage collection in forked processes skips these objects
    gc.unfreeze = lambda: None  # vLLM calls it at an engine's shutdown


def _become(request: dict[str, Any], descriptors: dict[int, int]) -> None:
    """Take over what a process inherits from its parent: session, descriptors, environment, folder, signals."""
    if request.get("session"):
        os.setsid()
    _take_descriptors(descriptors)
    os.environ.clear()
    os.environ.update(request["environ"])
    if network := request["environ"].get(stranger.NETWORK):
        stranger.enter_network(int(network))
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    time.tzset()
    tempfile.tempdir = None  # cached from the former environment
    for signum in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP} - _PYTHON_IGNORES:
        ignored = request["ignored"] >> (signum - 1) & 1
        signal.signal(signum, signal.SIG_IGN if ignored else signal.SIG_DFL)
        if signum == signal.SIGINT and not ignored:
            signal.signal(signum, signal.default_int_handler)


def _take_descriptors(descriptors: dict[int, int]) -> None:
    """Move descriptors to their numbers, via free ones, because numbers may overlap."""
    first_free = 1 + max([*descriptors, *descriptors.values()])
    aside = {}
    for number, descriptor in descriptors.items():
        aside[number] = os.dup2(descriptor, first_free + number, inheritable=False)
        os.close(descriptor)
    os.closerange(3, first_free)
    for number, descriptor in aside.items():
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    sys.stdin = _text(0, "r", "strict")
    sys.stdout, sys.stderr = _text(1, "w", "strict"), _text(2, "w", "backslashreplace")


def _text(descriptor: int, mode: str, errors: str) -> TextIO:
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors=errors, closefd=False)


def _run(request: dict[str, Any], python: str) -> None:
    """Run ``python -m module arguments``."""
    sys.executable = python
    if "torch" in sys.modules:  # it read the variable on import
        sys.modules["torch"].set_num_threads(int(request["environ"].get(env.OMP_NUM_THREADS, os.cpu_count())))
    sys.argv = [request["module"], *request["arguments"]]
    sys.modules.pop(request["module"], None)  # runpy would warn
    path = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
    own = [entry for entry in sys.path if "site-packages" in entry or "lib/python" in entry or entry.endswith(".zip")]
    sys.path[:] = [os.getcwd(), *filter(None, path), *own]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    given = _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), Path(sys.argv[3]).parent)
    assert given is not None
    _run(given, sys.argv[3])
