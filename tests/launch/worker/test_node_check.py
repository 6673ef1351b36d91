"""Faulty nodes: each fault is named with its node before anything heavy is imported."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlhpc.core.errors import NodeError
from rlhpc.launch.worker.node_check import check_node
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
