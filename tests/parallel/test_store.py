"""The job's store as torch uses it: like torch's own stores, for threads, forks, process groups and Megatron."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.store_client import StoreAddress
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.parallel.store import JobStore, open_store
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.waiting import PATIENCE


@pytest.fixture
def job_store(server):
    return JobStore(StoreAddress("127.0.0.1", server.port, server.secret))


# Each is called on a new store: what it returns, or the type of what it raises, must be the same everywhere.
OPERATIONS = {
    "set, get": lambda s: (s.set("k", "v"), s.get("k")),
    "set twice": lambda s: (s.set("k", "v"), s.set("k", "w"), s.get("k")),
    "set bytes": lambda s: (s.set("k", b"\0\xff"), s.get("k")),
    "set nothing": lambda s: (s.set("k", ""), s.get("k"), s.check(["k"])),
    "set text": lambda s: (s.set("ключ", "värde"), s.get("ключ")),
    "get in vain": lambda s: s.get("k"),
    "add": lambda s: (s.add("k", 2), s.add("k", -5), s.get("k")),
    "add large": lambda s: (s.add("k", 2**62), s.get("k")),
    "add nothing": lambda s: (s.add("k", 0), s.check(["k"])),
    "add to a set number": lambda s: (s.set("k", "40"), s.add("k", 2), s.get("k")),
    "check": lambda s: (s.set("a", "1"), s.check(["a"]), s.check(["a", "b"]), s.check(["b"])),
    "wait": lambda s: (s.set("a", "1"), s.set("b", "1"), s.wait(["a", "b"]), s.wait(["a"], timedelta(minutes=5))),
    "wait in vain": lambda s: (s.set("a", "1"), s.wait(["a", "b"])),
    "wait in vain, own timeout": lambda s: s.wait(["a"], timedelta(milliseconds=50)),
    "compare_set when missing, nothing expected": lambda s: (s.compare_set("k", "", "new"), s.get("k")),
    "compare_set when missing, something expected": lambda s: (s.compare_set("k", "old", "new"), s.check(["k"])),
    "compare_set as expected": lambda s: (s.set("k", "old"), s.compare_set("k", "old", "new"), s.get("k")),
    "compare_set otherwise": lambda s: (s.set("k", "other"), s.compare_set("k", "old", "new"), s.get("k")),
    "delete": lambda s: (s.set("k", "v"), s.delete_key("k"), s.delete_key("k"), s.check(["k"])),
    "append": lambda s: (s.append("k", "a"), s.append("k", "b"), s.get("k")),
    "multi": lambda s: (s.multi_set(["a", "b"], ["1", "2"]), s.multi_get(["b", "a", "b"])),
    "multi_get in vain": lambda s: (s.set("a", "1"), s.multi_get(["a", "b"])),
    "extended": lambda s: s.has_extended_api(),
    "timeout": lambda s: s.timeout,
    "barrier of one": lambda s: s.barrier("k", 1),
    "barrier in vain": lambda s: s.barrier("k", 2, timedelta(milliseconds=100)),
}


def outcome(name: str, store: dist.Store) -> object:
    operation = OPERATIONS[name]
    store.set_timeout(timedelta(milliseconds=100) if "in vain" in name else timedelta(minutes=5))
    try:
        return operation(store)
    except Exception as error:
        return type(error)


@pytest.mark.heavy
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_torchs_stores(name, job_store):
    prefix = f"{name}/"
    tcp = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    found = outcome(name, dist.PrefixStore(prefix, job_store))
    assert found == outcome(name, dist.PrefixStore(prefix, tcp))
    assert found == outcome(name, dist.PrefixStore(prefix, dist.HashStore()))
    # From Python without a detour through C++.
    own = StoreServer.open(host="127.0.0.1")
    assert found == outcome(name, JobStore(StoreAddress("127.0.0.1", own.port, own.secret)))
    own.close()


def test_adding_to_what_is_no_number_is_an_error_and_changes_nothing(job_store):
    for store in (job_store, dist.HashStore()):
        store.set("word", "abc")
        with pytest.raises(ValueError, match=r"number|stoll"):
            store.add("word", 1)
        assert store.get("word") == b"abc"


def test_several_keys_are_appended_to_at_once(job_store):
    for _ in range(2):
        job_store.multi_append({"appended a": b"1", "appended b": b"2"})
    assert job_store.multi_get(["appended a", "appended b"]) == [b"11", b"22"]


def test_keys_are_counted(job_store):
    before = dist.PrefixStore("x", job_store).num_keys()
    job_store.set("one more", "1")
    assert job_store.num_keys() == dist.PrefixStore("x", job_store).num_keys() == before + 1


def test_threads_use_one_store_and_a_waiting_one_holds_up_nobody(job_store):
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(job_store.get, "late") for _ in range(4)]
        list(pool.map(lambda who: [job_store.add("sum", who) for _ in range(50)], range(8)))
        assert job_store.get("sum") == str(50 * sum(range(8))).encode()
        assert not any(future.done() for future in waiting)
        job_store.set("late", "now")
        assert [future.result(PATIENCE) for future in waiting] == [b"now"] * 4


def test_a_clone_serves_from_c_plus_plus(job_store):
    clone = dist.PrefixStore("p/", job_store).clone()
    clone.set("k", "v")
    assert job_store.get("p//k") == b"v" or job_store.get("p/k") == b"v"


def test_the_store_outlives_its_python_name(server):
    prefix = dist.PrefixStore("kept/", JobStore(StoreAddress("127.0.0.1", server.port, server.secret)))
    import gc

    gc.collect()
    prefix.set("k", "v")
    assert prefix.get("k") == b"v"


def test_a_forked_child_takes_a_connection_of_its_own(job_store):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for number in range(200):
                job_store.set("child", str(number))
            code = 0
        finally:
            os._exit(code)
    for number in range(200):
        job_store.set("parent", str(number))
        assert job_store.get("parent") == str(number).encode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_lost_server_is_a_network_error():
    server = StoreServer.open(host="127.0.0.1")
    store = JobStore(StoreAddress("127.0.0.1", server.port, server.secret))
    threading.Timer(0.3, server.close).start()
    store.set_timeout(timedelta(minutes=5))
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"lost the job's store at 127\.0\.0\.1:\d+"):
        store.get("never")
    assert time.monotonic() - began < 60, "it does not wait for its own timeout"


def test_the_secret_leaves_the_environment_and_a_second_reader_still_gets_in(server):
    environ = {env.RLHPC_STORE: f"127.0.0.1:{server.port}", env.RLHPC_STORE_SECRET: server.secret.hex()}
    first, second = open_store(environ), None
    assert env.RLHPC_STORE_SECRET not in environ
    second = open_store(environ)
    assert first is not None
    assert second is not None
    first.set("from the first", "1")
    assert second.get("from the first") == b"1"


def test_no_store_is_named():
    assert open_store({}) is None


def test_a_store_without_its_secret_is_a_user_error():
    with pytest.raises(UserError, match=env.RLHPC_STORE_SECRET):
        open_store({env.RLHPC_STORE: "127.0.0.1:1"})


def meet() -> dict:
    """Join, build Megatron's groups for tp 2, pp 1, dp 2 and use each kind once."""
    import torch
    from megatron.core import parallel_state

    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import build_groups, join, leave
    from rlhpc.sharding.layout import ParallelLayout

    for name in (env.MASTER_ADDR, env.MASTER_PORT):
        del os.environ[name]  # the helper's own rendezvous
    info = RankInfo.from_environ()
    join(info, timeout_minutes=15)
    assert env.RLHPC_STORE_SECRET not in os.environ
    build_groups(ParallelLayout(world_size=info.world_size, tp=2), seed=1)
    found = {}
    for name in ("tensor_model_parallel", "data_parallel", "model_parallel"):
        total = torch.tensor([2**info.rank])
        dist.all_reduce(total, group=getattr(parallel_state, f"get_{name}_group")())
        found[name] = int(total)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    found["store"] = type(store).__name__
    leave()
    return found


@pytest.mark.ranks
def test_ranks_and_megatrons_groups_meet_in_it(server):
    settings = {env.RLHPC_STORE: f"127.0.0.1:{server.port}", env.RLHPC_STORE_SECRET: server.secret.hex()}
    found = run_ranks(meet, 4, join=False, environ=settings)
    assert [rank["store"] for rank in found] == ["JobStore"] * 4
    assert [rank["tensor_model_parallel"] for rank in found] == [0b11, 0b11, 0b1100, 0b1100]
    assert [rank["data_parallel"] for rank in found] == [0b101, 0b1010, 0b101, 0b1010]


@pytest.mark.ranks
def test_a_rank_with_another_secret_is_refused_in_one_line(server):
    settings = {env.RLHPC_STORE: f"127.0.0.1:{server.port}", env.RLHPC_STORE_SECRET: "00" * 32}
    with pytest.raises(RankFailed, match="it rejects our secret"):
        run_ranks(meet, 1, join=False, environ=settings)
