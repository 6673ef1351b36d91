"""Nodes before anything heavy is imported: faults by name, cores of their own, networks, store, room for files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhpc.core import env
from rlhpc.core.errors import NodeError
from rlhpc.launch.supervise.job_store import StoreServer
from rlhpc.launch.worker.node_check import (
    check_node,
    check_store,
    cores_of,
    interface_address,
    network_interface,
    own_share,
)
from rlhpc.launch.worker.node_folders import release
from tests.launch.worker.made_nodes import CHECK, HOST, ROOT, needs_root, of_attempt, on_node


def test_a_good_node_passes_and_its_settings_are_kept(tmp_path, capfd):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="own-") as tmpdir:
        environ = {"TMPDIR": tmpdir, "HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
        changed = dict(environ)
        check_node(tmp_path, HOST, environ=changed)
        own = of_attempt(f"{tmpdir}/rlhpc-{os.getuid()}-{os.getppid()}", node=os.uname().nodename)
        assert changed == {**environ, "TMPDIR": own}
        assert os.listdir(own) == []
        release()
        assert os.listdir(tmpdir) == []
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


RANKS_THAT_COME_AND_GO = """
import os
from rlhpc.launch.worker.node_folders import release, set_tmpdir
for _ in range(4):
    if not os.fork():
        for n in range(300):
            environ = dict(os.environ)
            set_tmpdir(environ, "77", 1, log=False)
            open(environ["TMPDIR"] + f"/{os.getpid()}", "w").close()
            release()
        os._exit(0)
assert [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)] == [0] * 4
"""


@pytest.mark.heavy
def test_a_rank_that_ends_takes_no_folder_from_one_that_begins(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="own-") as tmpdir:
        settings = {**os.environ, "TMPDIR": tmpdir}
        subprocess.run([sys.executable, "-c", RANKS_THAT_COME_AND_GO], env=settings, cwd=ROOT, timeout=120, check=True)
        assert os.listdir(tmpdir) == []


def test_a_master_without_an_address_is_named(tmp_path):
    with pytest.raises(NodeError, match=rf"^node {HOST}: the host name 'no-such\.invalid' has no address here \("):
        check_node(tmp_path, "no-such.invalid", environ={"TMPDIR": "/tmp", "HOME": "/"})


@needs_root
def test_a_node_that_does_not_know_its_own_name():
    found = on_node("", CHECK, name="node7")
    assert found.error.startswith("node node7: the host name 'node7' (this node's own name) has no address here (")


def test_a_run_folder_that_is_not_there(tmp_path):
    with pytest.raises(
        NodeError, match=r"the run folder '.*/gone' does not exist; put run_dir on a file system that all"
    ):
        check_node(tmp_path / "gone", HOST, environ={"TMPDIR": "/tmp", "HOME": "/"})


@needs_root
@pytest.mark.parametrize("first", [True, False])
def test_a_run_folder_that_is_mounted_read_only(first):
    setup = "mkdir /tmp/run; mount -t tmpfs -o ro tmpfs /tmp/run"
    found = on_node(setup, f"use(NONE), check_node(Path('/tmp/run'), 'localhost', local_rank={int(not first)})")
    assert found.error.startswith("node localhost: the run folder '/tmp/run' is not writable (")


@needs_root
@pytest.mark.parametrize("first", [True, False])
def test_a_run_folder_that_is_read_only_for_a_moment_is_waited_for(first):
    setup = "mkdir /tmp/run; mount -t tmpfs -o ro tmpfs /tmp/run"
    check = f"check_node(Path('/tmp/run'), 'localhost', local_rank={int(not first)})"
    found = on_node(setup, f"use(BRIEF), remount_when_waited_for('/tmp/run'), {check}")
    assert found.error == ""
    assert "Read-only file system; waiting up to 10 s for the file system" in found.message


@needs_root
def test_a_full_disk_is_no_fault_of_the_node():
    setup = "mkdir /tmp/run; mount -t tmpfs -o nr_inodes=1 tmpfs /tmp/run"
    assert on_node(setup, "check_node(Path('/tmp/run'), 'localhost')").error == "OSError 28"


INFINIBAND = """
mount -t tmpfs tmpfs /dev; mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9; mkdir -m 1777 /dev/shm
mkdir /dev/infiniband; mknod /dev/infiniband/uverbs0 c 231 192
"""


@needs_root
def test_infiniband_needs_locked_memory():
    found = on_node(INFINIBAND + "ulimit -l 64", CHECK)
    assert found.error.startswith("node localhost: only 64 KiB of memory may be locked, but InfiniBand needs no limit;")
    assert on_node("ulimit -l 64", CHECK).error == ""


@needs_root
def test_the_soft_limit_on_locked_memory_is_raised():
    call = f"({CHECK}, __import__('resource').getrlimit(8))[1]"
    found = on_node("ulimit -Sl 64", call)
    assert found.error == ""
    assert found.result == list(resource.getrlimit(resource.RLIMIT_MEMLOCK))[1:] * 2


@needs_root
def test_shared_memory_that_is_too_small_for_its_ranks():
    call = "check_node(Path('/tmp'), 'localhost', ranks_here={})"
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    found = on_node(small, call.format(8))
    assert found.error.startswith("node localhost: 64 MiB are free in /dev/shm, but 8 ranks need 128; enlarge it")
    assert on_node(small, call.format(2)).error == ""
    smaller = small.replace("64m", "20m")
    assert "20 MiB are free in /dev/shm, but 2 ranks need 32" in on_node(smaller, call.format(2)).error
    assert on_node(smaller, call.format(1)).error == "", "alone on its node it shares nothing"


def topology(folder: Path, sockets: int, cores: int) -> None:
    """Two hardware threads a core, numbered as Linux does: first one of each core, then the others."""
    for cpu in range(2 * sockets * cores):
        socket, core = divmod(cpu % (sockets * cores), cores)
        place = folder / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{socket}\n")
        (place / "core_id").write_text(f"{core}\n")


def test_ranks_have_whole_cores_of_one_socket(tmp_path: Path) -> None:
    topology(tmp_path, sockets=2, cores=4)
    cores = cores_of(range(16), tmp_path)
    assert cores[:2] == [[0, 8], [1, 9]]
    shares = [own_share(cores, rank, 4) for rank in range(4)]
    assert shares == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]


def test_only_cores_that_the_job_has_are_shared(tmp_path: Path) -> None:
    topology(tmp_path, sockets=1, cores=8)
    cores = cores_of({2, 10, 3, 11, 6, 14}, tmp_path)
    assert [own_share(cores, rank, 2) for rank in range(2)] == [{2, 10}, {3, 11}]
    assert own_share(cores, 0, 4) == set()
    assert cores_of([3, 1], tmp_path / "none") == [[1], [3]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_a_rank_is_bound_only_if_the_launcher_asks(tmp_path: Path) -> None:
    program = (
        "import os; from rlhpc.launch.worker.node_check import take_own_cores; "
        "take_own_cores(1, 2); print(len(os.sched_getaffinity(0)))"
    )

    def bound(**variables: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    every = len(os.sched_getaffinity(0))
    assert bound() == every
    assert bound(**{env.RLHPC_OWN_CORES: "1"}) < every


NETWORK = """
cat > /tmp/hosts << END
127.0.0.1 localhost
10.1.0.9 master-on-eth
10.2.0.9 master-on-ib
10.2.0.1 node1
127.0.1.1 loopback
END
mount --bind /tmp/hosts /etc/hosts
cable() { ip link add $1 type veth peer name $1-; ip addr add $2 dev $1; ip link set $1 up; ip link set $1- up; }
cable eth0 10.1.0.1/24
"""


SECOND = "cable ib0 10.2.0.1/24\n"


ROUTE = "ip route add default via 10.1.0.254\n"


@pytest.mark.heavy
@needs_root
@pytest.mark.parametrize(
    ("setup", "master", "interface"),
    [
        (NETWORK + SECOND, "master-on-eth", "eth0"),
        (NETWORK + SECOND, "master-on-ib", "ib0"),
        (NETWORK + SECOND, "node1", "ib0"),  # this node is the master
        (NETWORK + SECOND + ROUTE, "loopback", "eth0"),  # a master that has itself as 127.0.1.1
        (NETWORK, "loopback", "eth0"),
        (NETWORK + "ip addr add 10.2.0.7/24 dev eth0", "master-on-ib", "eth0"),  # a second address
        (NETWORK + "ip addr add 10.2.0.7/24 dev eth0 label eth0:1", "master-on-ib", "eth0"),
    ],
)
def test_the_interface_that_leads_to_the_master(setup, master, interface):
    assert on_node(setup, f"network_interface({master!r})", name="node1").result == interface


@needs_root
def test_an_interface_that_cannot_be_determined():
    found = on_node(NETWORK + SECOND, "network_interface('loopback')", name="node1")
    assert found.error == (
        "node node1: cannot determine which of its interfaces (eth0, ib0) leads to the other nodes: 'loopback' is"
        " 127.0.1.1 here; name it in slurm.interface"
    )


@needs_root
def test_the_address_of_an_interface():
    setup = NETWORK + SECOND + "ip addr add 10.1.0.2/24 dev eth0; ip addr add 10.2.0.2/24 dev ib0 label ib0:1"
    found = on_node(setup, "[interface_address(name) for name in ('eth0', 'ib0', 'lo', 'eth1')]")
    assert found.result == ["10.1.0.1", "10.2.0.1", "127.0.0.1", None]


def test_a_single_node_needs_no_network():
    assert interface_address("lo") == "127.0.0.1"
    assert network_interface("no-such.invalid", single_node=True) == "lo"


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


SMALL, NOEXEC = "mount -o remount,size=8m /tmp", "mount -o remount,noexec /tmp"
REMEDY = "; set TMPDIR in slurm.environment to a folder of the node that does"


@needs_root
@pytest.mark.parametrize(
    ("given", "before"), [("", ""), ("/tmp/gone", "TMPDIR '/tmp/gone' does not exist, and ")], ids=["unset", "gone"]
)
def test_a_node_whose_tmp_is_too_small_is_at_fault(given, before):
    found = on_node(SMALL, CHECK, TMPDIR=given, SLURM_JOB_ID="77")
    message = f"node localhost: {before}/tmp has only 8 MiB free of the 64 that its ranks need{REMEDY}, or remove files"
    assert found.error.startswith(message)


@needs_root
def test_each_rank_of_the_node_counts():
    found = on_node("mount -o remount,size=100m /tmp", f"{CHECK[:-1]}, ranks_here=2)", SLURM_JOB_ID="77")
    assert "/tmp has only 100 MiB free of the 128 that its ranks need" in found.error
    assert on_node("mount -o remount,size=100m /tmp", CHECK, SLURM_JOB_ID="77").error == ""


@needs_root
@pytest.mark.parametrize("variables", [{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"TORCHDYNAMO_DISABLE": "0"}])
def test_a_tmp_without_execution_is_refused_if_ranks_compile(variables):
    found = on_node(NOEXEC, CHECK, SLURM_JOB_ID="77", **variables)
    expected = "node localhost: /tmp is mounted noexec, so that compiled kernels cannot be loaded" + REMEDY
    assert found.error == f"UserError: {expected}", "the site mounts it so, on every node"


@needs_root
def test_a_tmpdir_without_execution_is_replaced_with_a_warning():
    setup = "mkdir /tmp/data; mount -t tmpfs -o noexec tmpfs /tmp/data"
    found = on_node(setup, CHECK, TMPDIR="/tmp/data", SLURM_JOB_ID="77", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
    assert "TMPDIR '/tmp/data' is mounted noexec, so that compiled kernels cannot be loaded; /tmp/rlhpc-0-77 is" in (
        found.message
    )


@needs_root
def test_ranks_that_compile_nothing_need_no_execution():
    found = on_node(NOEXEC, CHECK, SLURM_JOB_ID="77", TORCHDYNAMO_DISABLE="1")
    assert (found.error, found.message) == ("", "")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
