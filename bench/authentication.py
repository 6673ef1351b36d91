"""CPU time that ranks spend on proving who they are: the store's handshake and MACs, the MACs of objects, and looking
connections up, at the start and in steps, relative to the CPU time of the steps."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhpc.config.load import load_config
from rlhpc.core.context import RankContext
from rlhpc.core.files import write_json
from rlhpc.launch.runs.run import run_here
from tests.helpers.runs import write_config

STEPS, SFT_STEPS = 10, 3


class Clock:
    """CPU seconds of the threads in the functions that it has wrapped; calls inside others count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside, began = True, time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began
                self._inside = False

        return timed


def measured_rank(context: RankContext) -> str | None:
    """A rank as always, which then leaves what it has measured."""
    clock = Clock()
    from rlhpc.parallel import store  # before others import its functions

    clock.wrap(store, "seal", "opened")
    from rlhpc.core.store_client import StoreConnection
    from rlhpc.core.store_protocol import Direction
    from rlhpc.parallel import gloo
    from rlhpc.parallel.gloo import Meeting
    from rlhpc.trainer.loop import Loop
    from rlhpc.trainer.main import run_rank

    clock.wrap(Direction, "seal", "check")
    clock.wrap(StoreConnection, "_prove")
    clock.wrap(gloo, "_look", "_agreed_name", "open_inodes", "sockets_except", "close_to_all")
    clock.wrap(Meeting, "offer", "wait_for_all", "forget", "sightings")
    run, found = Loop.run, {}

    def timed_run(loop: Loop) -> str | None:
        found["start"], cpu = clock.seconds, time.process_time()
        stopped = run(loop)
        found.update(steps=time.process_time() - cpu, authentication=clock.seconds - found["start"])
        return stopped

    Loop.run = timed_run
    stopped = run_rank(context, saves_end=False)
    write_json(context.run.path / f"authentication-{context.info.rank}.json", found)
    return stopped


def measure(ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="authentication-") as name:
        tp = min(ranks, 2)
        steps = {"train__steps": STEPS, "sft__steps": SFT_STEPS}
        sizes = {"resources__ranks_per_node": ranks, "actor__parallel__tp": tp, "rollout__tp": tp}
        file = write_config(
            Path(name), resources__ranks_per_node=ranks, train__steps=STEPS, sft__steps=SFT_STEPS, **sizes
        )
        code = run_here(load_config(file), entry="bench.authentication:measured_rank")
        if code:
            sys.exit(code)
        found = [json.loads(path.read_text()) for path in Path(name, "run").glob("authentication-*.json")]
    start, steps, spent = (sum(one[key] for one in found) for key in ("start", "steps", "authentication"))
    count = STEPS + SFT_STEPS
    print(f"{ranks:5}  {start:10.3f}  {steps / count:10.3f}  {1e3 * spent / count:11.2f}  {100 * spent / steps:8.3f} %")


def main() -> None:
    print("CPU seconds, summed over ranks; the limit is 1 % of a step")
    print("ranks    at start  for a step  ms for MACs     share")
    for ranks in (2, 4):
        measure(ranks)


if __name__ == "__main__":
    main()
