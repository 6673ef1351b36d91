"""Small rank programs for jobs on a test cluster."""

from __future__ import annotations

import json
import os
import sys
import time

from rlhpc.core import env
from rlhpc.core.context import RankContext
from rlhpc.core.files import write_json
from rlhpc.core.store_client import reach, store_address
from rlhpc.core.store_protocol import Op, seconds


def note(context: RankContext) -> None:
    """Leave who this rank is and what it was given, and a line in its log."""
    info = context.info
    known = {"rank": info.rank, "world": info.world_size, "local": info.local_rank, "node": info.node}
    known["prefix"] = sys.prefix
    print(json.dumps(known), flush=True)
    write_json(context.run.path / f"rank-{context.attempt.number}-{info.rank}.json", {**known, "environ": _environ()})


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != env.RLHPC_STORE_SECRET}


def second_time(context: RankContext) -> None:
    """Wait to be ended the first time, be done the second."""
    note(context)
    if context.attempt.number == 1:
        time.sleep(600)


def meet(context: RankContext) -> None:
    """Tell the others this rank's run in the job's store and read theirs, then stay until the file ``go`` is there."""
    address, info = store_address(), context.info
    assert address is not None
    store = reach(address, 300)
    store.call(Op.SET, [b"rank%d" % info.rank, str(context.run.path).encode()])
    keys = [b"rank%d" % rank for rank in range(info.world_size)]
    _, values = store.call(Op.GET, [seconds(300), *keys], 300)
    assert {value.decode() for value in values} == {str(context.run.path)}, values
    note(context)
    while not (context.run.path / "go").exists():
        time.sleep(0.05)
