"""Starts the ranks of a run on this machine through submitit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from submitit import LocalExecutor

from rlhpc.config.schema import RunConfig
from rlhpc.core import env
from rlhpc.core.folder import AttemptFolder
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import node_name
from rlhpc.launch.machine import environment, rank_environment
from rlhpc.launch.supervise.process_watch import Ranks
from rlhpc.launch.worker.main import run_local_rank
from rlhpc.launch.worker.nsys import nsys_environment

_FOR_EVER_MINUTES = 60 * 24 * 365


@dataclass(frozen=True)
class LocalStart:
    """How ranks are started. ``settings``: further variables of their environment."""

    config: RunConfig
    attempt: AttemptFolder
    entry: str
    settings: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.config.world_size

    def start(self, ranks: range, generation: int = 0) -> Ranks:
        """Starts a part of the ranks, or all."""
        config, world_size = self.config, self.world_size
        executor = LocalExecutor(folder=self.attempt.logs)
        executor.update_parameters(
            tasks_per_node=len(ranks),
            gpus_per_node=len(ranks),
            timeout_min=_FOR_EVER_MINUTES,
            stderr_to_stdout=True,
        )
        visible = os.environ.get(env.CUDA_VISIBLE_DEVICES)
        arguments: tuple[Any, ...] = (self.entry, str(self.attempt.path), ProcessId.own(), visible)
        settings = {**rank_environment(config), **nsys_environment(config.profile), **self.settings}
        if len(ranks) < world_size:
            settings |= {
                env.RLHPC_WORLD_SIZE: str(world_size),
                env.RLHPC_FIRST_RANK: str(ranks.start),
                env.RLHPC_FIRST_LOCAL_RANK: str(ranks.start),
                env.RLHPC_GENERATION: str(generation),
            }
        # The launcher handles Ctrl-C; the processes inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with environment(settings):
                job = executor.submit(run_local_rank, *arguments)
        finally:
            signal.signal(signal.SIGINT, handler)
        started = Ranks(job, self.attempt.exits, ranks, node_name())
        if len(ranks) < world_size:
            self._link_logs(started)
        return started

    def _link_logs(self, ranks: Ranks) -> None:
        """Names the logs by the run's ranks; submitit names them by its jobs and their tasks."""
        for rank in ranks.ranks:
            link = self.attempt.logs / f"rank-{rank:05d}.log"
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            link.symlink_to(ranks.log(rank).name)
