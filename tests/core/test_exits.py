"""Which rank was the cause, from records alone."""

from __future__ import annotations

import pickle

import pytest

from rlhpc.core.errors import NodeError, NonFiniteError, PeerLost, UserError
from rlhpc.core.exits import ExitRecord, classify, first_failure, read_exits, read_starts, run_recorded, write_exit
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId
from rlhpc.core.rank import RankInfo

INFO = RankInfo(rank=1, world_size=2, local_rank=1, node="node", master_addr="", master_port=1)


def record(rank: int, kind: str, time: float) -> ExitRecord:
    return ExitRecord(rank, "node", 1, time, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ([(0, "done", 1.0), (1, "done", 2.0)], None),
        ([(0, "error", 2.0), (1, "error", 1.0)], 1),
        ([(0, "peer", 1.0), (1, "error", 2.0)], 1),
        ([(0, "peer", 1.0), (1, "signal", 2.0), (2, "peer", 1.5)], 1),
        ([(0, "error", 1.0), (1, "signal", 2.0)], 0),
        ([(0, "error", 2.0), (1, "signal", 1.0)], 1),
        ([(0, "error", 1.0), (1, "user", 2.0), (2, "signal", 0.5)], 1),
        ([(0, "peer", 2.0), (1, "peer", 1.0), (2, "done", 0.5)], 1),
    ],
)
def test_the_cause_is_found(records, cause):
    found = first_failure(record(*entry) for entry in records)
    assert (found.rank if found else None) == cause


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("NCCL is not there"), "user"),
        (ValueError("wrong shape"), "error"),
        (NonFiniteError("the batches are in /home/alice/nccl/run"), "error"),
        (SystemExit(3), "error"),
        (SystemExit(0), "done"),
        (KeyboardInterrupt(), "peer"),
        (BrokenPipeError(), "peer"),
        (PeerLost("no rank has posted published/3 on the board within 5 s"), "peer"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5"), "peer"),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, remote process exited"), "peer"),
        (RuntimeError("failed to recv, got 0 bytes"), "peer"),
    ],
)
def test_errors_are_distinguished_from_lost_peers(error, kind):
    assert classify(error) == kind


@pytest.mark.parametrize("kind", [UserError, NodeError])
def test_an_error_is_whole_in_another_process(kind):
    given = kind("wrong", where="a.b", remedy="fix it")
    found = pickle.loads(pickle.dumps(given))
    assert (type(found), str(found)) == (kind, "a.b: wrong; fix it")


@pytest.mark.parametrize("path", ["os.path", "os.path:", ":join", ".path:join"])
def test_what_is_no_import_path(path):
    with pytest.raises(UserError, match=r"^rewards\.0\.function: .* package\.module:function"):
        import_attribute(path, "rewards.0.function")


def test_an_error_that_came_from_a_lost_peer_is_one():
    error = ValueError("the collective failed")
    error.__cause__ = RuntimeError("Connection reset by peer")
    assert classify(error) == "peer"


def test_a_rank_leaves_its_start_and_its_end(tmp_path):
    seen = []

    def work() -> None:
        seen.append(read_starts(tmp_path)[1])
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        run_recorded(tmp_path, INFO, work)
    assert seen[0].process == ProcessId.own()
    ended = read_exits(tmp_path)[1]
    assert (ended.kind, ended.type, ended.message) == ("error", "ValueError", "wrong")
    assert "in work" in ended.traceback
    write_exit(tmp_path, INFO, None)
    assert read_exits(tmp_path)[1] == ended, "the first record of a process stays"


def test_success_is_recorded_as_done(tmp_path):
    run_recorded(tmp_path, INFO, lambda: None)
    assert read_exits(tmp_path)[1].kind == "done"


def test_records_go_by_the_job_s_ranks(tmp_path):
    engines = [RankInfo(rank, 4, rank, "node", "", 1).in_role("engines", 2, 2) for rank in (2, 3)]
    for info in engines:
        run_recorded(tmp_path, info, lambda: None)
    assert [info.rank for info in engines] == [0, 1]
    assert sorted(read_starts(tmp_path)) == sorted(read_exits(tmp_path)) == [2, 3]
    assert [record.rank for record in read_exits(tmp_path).values()] == [2, 3]
