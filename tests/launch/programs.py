"""Small rank programs that tests launch for real."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlhpc.config.load import load_config
from rlhpc.core import env
from rlhpc.core.context import RankContext
from rlhpc.core.errors import NodeError, NonFiniteError, UserError
from rlhpc.core.exits import read_exits
from rlhpc.core.files import LineFile
from rlhpc.core.store_client import store_address

HANG_SECONDS = 600.0  # of a rank that waits for others


def rank() -> int:
    return int(os.environ[env.RANK])


def write_environment(context: RankContext) -> None:
    """Leave this rank's environment and the store's secret where the test finds them, and steps in metrics.jsonl."""
    assert env.RLHPC_STORE_SECRET not in os.environ, "children would inherit it"
    store = store_address()
    assert store is not None
    known = {**os.environ, env.RLHPC_STORE_SECRET: store.secret.hex()}
    Path(context.run.path, f"environment-{rank()}.json").write_text(json.dumps(known))
    if rank() == 0:
        with open(Path(context.run.path, "metrics.jsonl"), "a") as file:
            for step in (1, 2):
                record = {"phase": "rl", "step": step, "total_steps": 2, "time": time.time(), "reward/mean": step / 4}
                file.write(json.dumps(record) + "\n")
        Path(context.run.path, "report").mkdir(exist_ok=True)
        Path(context.run.path, "report", "report.txt").write_text("the report\n")


def write_folders(context: RankContext) -> None:
    """Leave the path of this rank's folder for temporary files in the run folder, and a file in it."""
    folder = Path(tempfile.gettempdir())
    names = (env.TMPDIR, env.TORCHINDUCTOR_CACHE_DIR)
    (folder / "socket").touch()
    cache = Path(os.environ[env.TORCHINDUCTOR_CACHE_DIR])
    cache.mkdir(exist_ok=True)
    (cache / "kept").touch()
    found = [str(folder), folder.stat().st_uid, oct(folder.stat().st_mode), *(os.environ[name] for name in names)]
    Path(context.run.path, f"folders-{rank()}.json").write_text(json.dumps(found))


def odd_output(context: RankContext) -> None:
    """Metrics and a report that nobody can show."""
    context.run.metrics.write_bytes(b'{"phase": "rl", "step": 1\n\xff\n[]\n{"phase": "rl", "step": 2, "loss": [1]}\n')
    context.run.report_text.mkdir(parents=True)


def resumed(context: RankContext) -> None:
    """Take the steps after the second again, with longer lines, all before the launcher looks."""
    kept = context.run.metrics.read_text().splitlines(keepends=True)[:2]
    record = {"phase": "rl", "total_steps": 6, "time": time.time(), "reward/mean": 0.123456789}
    new = context.run.path / "new"
    new.write_text("".join([*kept, *(json.dumps({**record, "step": step}) + "\n" for step in range(3, 7))]))
    new.rename(context.run.metrics)


def user_error_on_rank_one(context: RankContext) -> None:
    """The others hang, as in a collective."""
    if rank() == 1:
        raise UserError("8 is too many", where="rollout.tp", remedy="use 4")
    time.sleep(HANG_SECONDS)


def not_finite(context: RankContext) -> None:
    raise NonFiniteError("rl step 3: not finite; the batches are in /r/nccl")


def killed_rank_one(context: RankContext) -> None:
    """Rank 1 dies without a message; the others lose their connection to it."""
    doomed = Path(context.run.path, "doomed")
    if rank() == 1:
        doomed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not doomed.exists():
        time.sleep(0.01)
    time.sleep(0.2)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")


class OutOfMemoryError(RuntimeError):
    """By name what torch raises on a GPU."""


def fails_once(context: RankContext) -> None:
    """Rank 1 fails in the first attempt, with ``failure`` of the configuration's name: after a step, or before it."""
    config = load_config(context.attempt.config)
    failure, _, before = config.name.partition("-")
    if not before and rank() == 0:
        record = {"phase": "rl", "step": context.attempt.number, "total_steps": 2, "time": time.time()}
        LineFile(context.run.metrics).append(json.dumps(record) + "\n")
    context.heartbeat.touch("train")
    if rank() == 1 and failure == "memory" and config.train.tokens_per_microbatch > 8000:
        time.sleep(1.0)
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if context.attempt.number > 1 or (failure == "memory" and rank() == 1):
        return
    time.sleep(1.0)
    if rank() == 1 and failure == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 1 and failure == "node":
        raise NodeError("CUDA driver initialization failed", where="node x")
    time.sleep(HANG_SECONDS)


def late_for_a_collective(context: RankContext) -> None:
    """Rank 1 stays in its own code while rank 0 waits for it, both joined as in a run."""
    import torch
    import torch.distributed as dist

    from rlhpc.core.heartbeat import touch
    from rlhpc.trainer.main import _join

    _join(context)
    dist.all_reduce(torch.ones(3))
    touch("rollout", 7)
    if rank() == 1:
        time.sleep(HANG_SECONDS)
    dist.all_reduce(torch.ones(3))


def error_then_lost_peers(context: RankContext) -> None:
    """Rank 2 fails of itself; the others see it as a lost peer, and write their records before it does."""
    broken = Path(context.run.path, "broken")
    if rank() == 2:
        broken.touch()
        while set(read_exits(context.attempt.exits)) != {0, 1}:
            time.sleep(0.01)
        time.sleep(1.5)
        raise KeyError("the real cause")
    while not broken.exists():
        time.sleep(0.01)
    raise ConnectionResetError("Connection reset by peer")


def error_while_the_heartbeat_is_busy(context: RankContext) -> None:
    """Rank 1 fails while its heartbeat's thread is deep in a call, so that it takes seconds to end."""
    if rank() == 0:
        time.sleep(HANG_SECONDS)
    busy = context.run.path / "busy"
    context.heartbeat.watch_collectives(lambda: (busy.touch(), time.sleep(HANG_SECONDS)))  # type: ignore[arg-type,return-value]
    context.heartbeat._ask_store = lambda record: "request"  # type: ignore[method-assign]
    while not busy.exists():
        time.sleep(0.01)
    raise KeyError("the real cause")


def hang(context: RankContext) -> None:
    """Say who this is and which child it has, then ignore every polite signal."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_SECONDS})"])
    Path(context.run.path, f"pids-{rank()}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(HANG_SECONDS)


def stop_when_asked(context: RankContext) -> str:
    """Work until asked to stop, and save."""
    Path(context.run.path, f"pids-{rank()}").write_text(f"{os.getpid()} {os.getpid()}")
    while context.stop.reason == "none":
        time.sleep(0.01)
    Path(context.run.path, f"saved-{rank()}").touch()
    return context.stop.reason


def killed_when_asked(context: RankContext) -> None:
    """Work until asked to stop, after a step, and die instead of saving."""
    record = {"phase": "rl", "step": 1, "total_steps": 2, "time": time.time()}
    LineFile(context.run.metrics).append(json.dumps(record) + "\n")
    stop_when_asked(context)
    os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """Takes long to free, like the modules of a deep-learning framework."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep, seconds: float = HANG_SECONDS) -> None:
        sleep(seconds)


KEPT: list[Slow] = []


def slow_to_tidy_up(context: RankContext) -> None:
    """Done at once, but with much left to free."""
    KEPT.append(Slow())
    atexit.register(Path(context.run.path, "tidied").touch)


def prepare(folder: str, fail: str = "", until: str = "") -> None:
    """A prepare hook: makes inputs, when the file ``until`` exists or half a minute is over, or fails as requested."""
    from tests.helpers.plain_model import write_inputs

    if until:
        Path(f"{until}.awaited").touch()
        end = time.monotonic() + 30
        while not Path(until).exists() and time.monotonic() < end:
            time.sleep(0.1)
    if fail == "user":
        raise UserError("no space", where="prepare", remedy="free some")
    if fail:
        raise RuntimeError(fail)
    write_inputs(Path(folder))


def crash_on_rank_one(context: RankContext) -> None:
    """A segmentation fault in native code."""
    if rank() == 1:
        import ctypes

        ctypes.string_at(0)
    time.sleep(HANG_SECONDS)


def work_until_told(context: RankContext) -> None:
    """Take steps as a trainer does, until the test says that it is enough: outside of the run folder."""
    lines, step = LineFile(context.attempt.path / f"steps-{rank()}.jsonl"), 0
    while not (context.run.path.parent / "enough").exists():
        step += 1
        context.heartbeat.touch("train", step)
        context.attempt.check_current()
        lines.append(json.dumps({"step": step}) + "\n")
        time.sleep(0.02)
