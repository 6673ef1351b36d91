"""Starts real ranks for tests: separate processes on this machine, joined by gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.core import env
from rlhpc.core.process import ProcessId
from tests.helpers import session, warm


class RankFailed(AssertionError):
    """A rank raised, died or timed out; the message contains its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    join: bool = True,
    timeout: float = 900,
    environ: Mapping[str, str] | None = None,
    fresh: bool = False,
    roles: Sequence[int] = (),
    killed: Collection[int] = (),
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` new processes and return the results by rank.

    ``function`` must be importable (defined at a module's top level); arguments and results are pickled. ``join``:
    initialize the default process group (gloo) before the call and destroy it afterwards. ``fresh``: ranks import
    everything themselves. ``roles``: sizes of two worlds, trainers and engines, which ranks join as in a job with a
    store: ``RankInfo.from_environ()`` has the role, ``rlhpc.parallel.groups.job_store()`` is common to both.
    ``killed``: ranks that may die of SIGKILL; their result is None. If another rank fails, ends the others and raises
    RankFailed with the first failure's traceback.
    """
    session.need("ranks")
    assert not roles or sum(roles) == world_size, f"roles of {roles} ranks in a job of {world_size}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, contextlib.ExitStack() as held:
        folder = Path(name)
        call = pickle.dumps((function, args))
        (folder / "call.pickle").write_bytes(pickle.dumps((list(sys.path), join, timeout, tuple(roles), call)))
        store = held.enter_context(_job_store()) if roles else {}
        common = {**os.environ, **_rendezvous(world_size), **store, **(environ or {})}
        processes = [_start(folder, rank, common, fresh) for rank in range(world_size)]
        try:
            _wait(processes, folder, timeout, killed)
        finally:
            for process in processes:
                # With its children: Megatron's checkpoint writer leaves a helper process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        files = [folder / f"{rank}.result" for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@contextlib.contextmanager
def _job_store() -> Iterator[dict[str, str]]:
    """A job's store; yields the variables by which ranks find it."""
    from rlhpc.launch.supervise.job_store import StoreServer

    server = StoreServer.open(host="127.0.0.1")
    try:
        yield {env.RLHPC_STORE: f"127.0.0.1:{server.port}", env.RLHPC_STORE_SECRET: server.secret.hex()}
    finally:
        server.close()


def _rendezvous(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        env.WORLD_SIZE: str(world_size),
        env.LOCAL_WORLD_SIZE: str(world_size),
        env.MASTER_ADDR: "127.0.0.1",
        env.MASTER_PORT: str(port),
        env.OMP_NUM_THREADS: "1",
        env.TORCHDYNAMO_DISABLE: "1",  # as the launcher starts ranks without a GPU
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        settings[env.GLOO_SOCKET_IFNAME] = "lo"
    return settings


def _start(folder: Path, rank: int, common: Mapping[str, str], fresh: bool) -> subprocess.Popen | warm.Forked:
    """Start one rank, with the repository's root first on its path."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, common.get("PYTHONPATH", "")]))
    own = {env.RANK: str(rank), env.LOCAL_RANK: str(rank), "PYTHONPATH": path}
    with open(folder / f"{rank}.log", "wb") as log:
        if warm.usable(common) and not fresh:
            return warm.Forked("tests.helpers.distributed", [str(folder)], rank, {**common, **own}, log.fileno())
        return subprocess.Popen(
            [warm.INTERPRETER if fresh else sys.executable, "-m", "tests.helpers.distributed", str(folder)],
            env={**common, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[Any], folder: Path, timeout: float, killed: Collection[int]) -> None:
    deadline = time.monotonic() + timeout

    def failed_ranks() -> list[int]:
        codes = enumerate(process.poll() for process in processes)
        return [rank for rank, code in codes if code and not (rank in killed and code == -signal.SIGKILL)]

    while any(process.poll() is None for process in processes):
        if failed_ranks():
            time.sleep(0.5)  # the first failure may cause others: let them write their tracebacks
            _collect_dead(processes)
            break
        if time.monotonic() > deadline:
            late = [rank for rank, process in enumerate(processes) if process.poll() is None]
            raise RankFailed(f"ranks {late} still ran after {timeout:.0f} s\n{_log(folder, late[0])}")
        time.sleep(0.02)
    if failed := failed_ranks():
        first = min(failed, key=lambda rank: _failed_at(folder, rank))
        raise RankFailed(
            f"rank {first} of {len(processes)} failed first, exit {processes[first].returncode}"
            f" (failed: {failed})\n{_log(folder, first)}"
        )


def _collect_dead(processes: list[Any]) -> None:
    """Wait for the exit codes of ended processes, which may arrive after those of their victims."""
    while any(process.poll() is None and ProcessId.of(process.pid) is None for process in processes):
        time.sleep(0.02)


def _failed_at(folder: Path, rank: int) -> float:
    """Time at which the rank raised; 0 for a rank that a signal killed, which counts as first."""
    note = folder / f"{rank}.failed"
    return float(note.read_text()) if note.exists() else 0.0


def _log(folder: Path, rank: int, lines: int = 60) -> str:
    text = (folder / f"{rank}.log").read_text(errors="replace")
    return f"--- rank {rank}, end of output ---\n" + "\n".join(text.splitlines()[-lines:])


def _join(rank: int, roles: Sequence[int], timeout: float) -> None:
    if not roles:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        return
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import join

    trainers, engines = roles
    role = ("trainers", 0, trainers) if rank < trainers else ("engines", trainers, engines)
    join(RankInfo.from_environ().in_role(*role), timeout / 60)


def run_child(folder: Path) -> None:
    """Program of a rank: call the function, store the result, exit."""
    rank = int(os.environ[env.RANK])
    try:
        sys_path, join, timeout, roles, call = pickle.loads((folder / "call.pickle").read_bytes())
        sys.path[:] = [*sys_path, *(entry for entry in sys.path if entry not in sys_path)]
        function, args = pickle.loads(call)
        if join:
            _join(rank, roles, timeout)
        result = pickle.dumps(function(*args))
        if join:
            import torch.distributed as dist

            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.failed").write_text(repr(time.time()))
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads that wait in a collective must not keep the process alive
    (folder / f"{rank}.result").write_bytes(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run_child(Path(sys.argv[1]))
