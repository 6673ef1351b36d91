"""Objects of ranks: a pickle of another program is refused before it is unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers.distributed import run_ranks


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def receive_pickle(folder: str, through: str) -> str:
    """Rank 1 sends the bytes of a pickle, in the framing of the call with which rank 0 receives."""
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import join, leave
    from rlhpc.parallel.transfer import gather_objects, one_to_all

    for name in (env.MASTER_ADDR, env.MASTER_PORT):
        del os.environ[name]  # the helper's own rendezvous
    info = RankInfo.from_environ()
    join(info, timeout_minutes=15)
    content = torch.frombuffer(bytearray(pickle.dumps(Planted(Path(folder) / through))), dtype=torch.uint8)
    assert one_to_all({"from": 1}, speaker=1) == gather_objects(info.rank and {"from": 1})[1]
    everyone = [""] * 2
    dist.all_gather_object(everyone, "x" * (1 + 1000 * info.rank))
    assert list(map(len, everyone)) == [1, 1001]
    seen = ""
    if info.rank == 1 and through == "broadcast":
        dist.broadcast(torch.tensor([content.numel()]), src=1)
        dist.broadcast(content, src=1)
    elif info.rank == 1:
        dist.all_reduce(torch.tensor([0, content.numel()]))
        dist.broadcast(content, src=1)
    else:
        try:
            one_to_all(None, speaker=1) if through == "broadcast" else gather_objects(None)
        except RuntimeError as error:
            seen = str(error)
    leave()
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("through", ["broadcast", "gather"])
def test_a_pickle_without_the_jobs_mac_is_not_unpickled(tmp_path, through):
    server = StoreServer.open(host="127.0.0.1")
    settings = {env.RLHPC_STORE: f"127.0.0.1:{server.port}", env.RLHPC_STORE_SECRET: server.secret.hex()}
    seen = run_ranks(receive_pickle, 2, str(tmp_path), through, join=False, environ=settings)[0]
    server.close()
    assert list(tmp_path.iterdir()) == []
    assert "no rank of this job sent them" in seen
