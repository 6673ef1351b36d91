"""Who a process is among the ranks, by the words of whoever started it."""

from __future__ import annotations

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.rank import RankInfo

MET = {"MASTER_ADDR": "node1", "MASTER_PORT": "2000"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (0, 1, 0)),
        ({"WORLD_SIZE": "4"}, (0, 1, 0)),
        ({"RANK": "3"}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", **SLURM}, (3, 4, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}, (3, 4, 2)),
        (SLURM, (5, 8, 1)),
        ({**SLURM, "RLHPC_WORLD_SIZE": "16"}, (5, 16, 1)),
        ({"RANK": "3", **SLURM}, (5, 8, 1)),
    ],
)
def test_ranks_by_launcher(environ: dict[str, str], found: tuple[int, int, int]) -> None:
    info = RankInfo.from_environ({**environ, **MET, "SLURM_RESTART_COUNT": "2"})
    assert (info.rank, info.world_size, info.local_rank) == found
    assert (info.master_addr, info.master_port, info.restart_count) == ("node1", 2000, 2)
    assert info.place == f"{info.node}-{info.rank - info.local_rank}"


def test_ranks_must_know_where_to_meet() -> None:
    with pytest.raises(UserError, match="MASTER_PORT: rank 5 of 8 has no rendezvous"):
        RankInfo.from_environ(SLURM)
    assert RankInfo.from_environ({**SLURM, "RLHPC_STORE": "node1:3000"}).rank == 5
    assert RankInfo.from_environ({}).master_port == 0


def test_a_rank_in_a_role_keeps_its_place_in_the_job() -> None:
    whole = RankInfo.from_environ({**SLURM, **MET})
    info = whole.in_role("engines", 4, 3)
    assert (info.role, info.rank, info.world_size, info.local_rank) == ("engines", 1, 3, 1)
    assert (info.job_rank, info.job_size) == (whole.job_rank, whole.job_size) == (5, 8)
    assert info.place == whole.place
    with pytest.raises(AssertionError, match="rank 5 is in role engines"):
        info.in_role("trainers", 0, 2)
    with pytest.raises(AssertionError, match="rank 5 is not in role trainers"):
        whole.in_role("trainers", 0, 5)


def test_the_environment_of_a_role_names_the_same_rank() -> None:
    environ = {**SLURM, **MET}
    info = RankInfo.from_environ(environ).in_role("engines", 4, 3)
    info.export(environ)
    assert RankInfo.from_environ(environ) == info
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("1", "3", "1")
    # The rank of a run that starts in such a process is not in that role.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del environ[name]
    assert RankInfo.from_environ(environ) == RankInfo.from_environ({**SLURM, **MET})
