"""A node that cannot reach the job's store is at fault, and says which address it found."""

from __future__ import annotations

import pytest

from rlhpc.core import env
from rlhpc.core.errors import NodeError
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.worker.node_check import check_store


def test_a_store_that_answers_passes_and_keeps_the_secret(server):
    environ = server.environment("localhost")
    before = dict(environ)
    check_store(environ)
    assert environ == before


def test_ranks_without_a_store_pass():
    check_store({})


def test_a_store_that_does_not_answer_is_the_node_s_fault(server, monkeypatch):
    monkeypatch.setenv(env.SLURMD_NODENAME, "node7")
    server.close()
    with pytest.raises(NodeError, match=r"^node node7: the job's store at localhost:\d+ \(127\.0\.0\.1\): no conn"):
        check_store(server.environment("localhost"), seconds=0.2)


def test_another_program_at_the_address_is_the_node_s_fault(server):
    other = StoreServer.open(host="127.0.0.1")
    environ = {**server.environment("localhost"), env.RLHPC_STORE: f"localhost:{other.port}"}
    try:
        with pytest.raises(NodeError, match=r"\(127\.0\.0\.1\): it rejects our secret"):
            check_store(environ, seconds=5)
    finally:
        other.close()
