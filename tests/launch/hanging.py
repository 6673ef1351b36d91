"""Ranks that hang for real, each scenario in its own way: ``python -m tests.launch.hanging FOLDER SCENARIO``.

``python -m tests.launch.hanging FOLDER SCENARIO watch`` is a batch step that starts them with srun and watches them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhpc.core import env
from rlhpc.core.heartbeat import Heartbeat, touch
from rlhpc.core.rank import RankInfo
from rlhpc.core.store_client import store_address

RANKS, SILENCE = 4, 4.0


def user_reward(seconds: float) -> float:
    """Somebody's reward function that asks a server which does not answer."""
    time.sleep(seconds)
    return 0.0


def sleeping(rank: int) -> None:
    """Rank 1 is in user code while the others wait for it."""
    if rank == 1:
        touch("rollout", 7)
        user_reward(600)


def stopped(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def spinning(rank: int) -> None:
    while rank == 3:
        pass


def native(rank: int) -> None:
    """Rank 3 sleeps in C without letting go of the interpreter's lock."""
    if rank == 3:
        touch("rollout", 7)
        while True:
            ctypes.PyDLL(None).sleep(600)


def other_collective(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 2:
        dist.broadcast(torch.ones(3), src=0)


def skipping(rank: int) -> None:
    """Rank 1 leaves out one reduction of Megatron's over its tensor-parallel group."""
    import torch
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as reduce

    for step in range(4):
        touch("train", step)
        if rank != 1 or step != 2:
            reduce(torch.ones(5))


def ending(rank: int) -> None:
    if rank == 0:
        touch("done")
        from rlhpc.core import heartbeat

        assert heartbeat._current is not None
        heartbeat._current.stop()
        time.sleep(600)


def never_joining(rank: int) -> None:
    """Before there is any process group."""
    if rank == 1:
        user_reward(600)


class PollClock:
    """The watch's time: it starts when every rank has entered the scenario, and passes only between polls.

    A machine that stalls for seconds delays this clock as it delays the ranks' answers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._now = folder, 0.0

    def __call__(self) -> float:
        return self._now

    def pass_by(self, seconds: float = 0.2) -> None:
        time.sleep(seconds)
        if len(list(self._folder.glob("entered-*"))) == RANKS:
            self._now += seconds


def line_up(folder: Path, info: RankInfo) -> None:
    """Wait until all ranks have imported what they need: on a busy machine that takes some much longer than others."""
    (folder / f"ready-{info.rank}").touch()
    while len(list(folder.glob("ready-*"))) < info.world_size:
        time.sleep(0.05)


def main(folder: Path, scenario: str) -> None:
    info = RankInfo.from_environ()
    store = store_address()
    beat = Heartbeat(folder, info.rank, world_size=info.world_size, hang_timeout_seconds=SILENCE, store=store).start()
    import torch
    import torch.distributed as dist

    from rlhpc.parallel.groups import build_groups, join, last_collectives
    from rlhpc.sharding.layout import ParallelLayout

    if scenario == "skipping":
        import megatron.core.parallel_state  # noqa: F401  (takes seconds)
    line_up(folder, info)
    touch("join")
    if scenario == "never_joining":
        (folder / f"entered-{info.rank}").touch()
        never_joining(info.rank)
    join(info)
    beat.watch_collectives(last_collectives)
    if scenario == "skipping":
        build_groups(ParallelLayout(world_size=info.world_size, tp=2), seed=1)
    for step in range(3):
        touch("train", step)
        dist.all_reduce(torch.ones(3))
    if scenario == "healthy":
        for step in range(1 << 30):
            time.sleep(0.25 if info.rank == 0 else 0)  # the others wait for a slow peer most of the time
            dist.all_reduce(torch.ones(3))
            if info.rank == 0:
                touch("train", step)
    (folder / f"entered-{info.rank}").touch()
    globals()[scenario](info.rank)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    time.sleep(600)


def watch(folder: Path, scenario: str) -> None:
    """Write hang.txt and when the silence began; end the ranks."""
    from rlhpc.core.heartbeat import DUMP_SIGNAL
    from rlhpc.core.rank import node_name
    from rlhpc.launch.supervise.hang_watch import HangWatch, WatchedRanks
    from rlhpc.launch.supervise.job_store import StoreServer

    job = os.environ[env.SLURM_JOB_ID]
    server = StoreServer.open()
    settings = {
        env.RLHPC_STORE: f"{node_name()}:{server.port}",
        env.RLHPC_STORE_SECRET: server.secret.hex(),
        env.GLOO_SOCKET_IFNAME: "eth0",
        env.TORCHDYNAMO_DISABLE: "1",
    }
    signal_all = functools.partial(subprocess.run, ["scancel", f"--signal={int(DUMP_SIGNAL)}", job], check=True)
    clock = PollClock(folder)
    hangs = HangWatch(folder, WatchedRanks(RANKS, SILENCE, 120.0), server.beats, signal_all, clock)
    command = ["srun", "--mpi=none", sys.executable, "-m", "tests.launch.hanging", str(folder), scenario]
    ranks = subprocess.Popen(command, env={**os.environ, **settings})
    while (hang := hangs.poll()) is None and ranks.poll() is None:
        clock.pass_by()
    (folder / "found.json").write_text(json.dumps([hang and hang.rank, hang and hang.node, hangs.silent_for]))
    ranks.terminate()
    ranks.wait()


if __name__ == "__main__":
    if sys.argv[3:] == ["watch"]:
        watch(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2])
