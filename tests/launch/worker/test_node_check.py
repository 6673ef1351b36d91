"""Faulty nodes, made of namespaces: each fault is named with its node before anything heavy is imported."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhpc.core.errors import NodeError
from rlhpc.launch.worker.node_check import check_node
from rlhpc.launch.worker.node_folders import release

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="namespaces need root: these tests DID NOT RUN"
)


def of_attempt(folder: str, number: int = 1, node: str = "localhost") -> str:
    """TMPDIR of an attempt in a job's folder."""
    return f"{folder}/{number}-{zlib.crc32(node.encode()) & 0xFFFF:04x}"


@dataclass(frozen=True)
class Outcome:
    """What a call did: its result or the error's text, the environment after it, and what it said on stderr."""

    result: object
    error: str
    environ: dict[str, str]
    message: str


CODE = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core import scratch
from rlhpc.core.storage import BRIEF, NONE, use, waits
from rlhpc.launch.worker.node_check import check_node, interface_address, network_interface

def remount_when_waited_for(folder):
    before = waits()
    def act():
        while waits() == before:
            time.sleep(0.01)
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    threading.Thread(target=act).start()

result, error = None, ""
try:
    result = eval(sys.argv[1])
except UserError as e:
    error = str(e) if isinstance(e, NodeError) else f"UserError: {e}"
except OSError as e:
    error = f"OSError {e.errno}"
assert "torch" not in sys.modules
print(json.dumps([result, error, dict(os.environ)]))
"""


def on_node(setup: str, call: str, *, name: str = "localhost", **environ: str) -> Outcome:
    """Evaluate ``call`` on a node of its own: new network, mounts, host name and /tmp, after the shell lines ``setup``.

    A variable given as empty is unset.
    """
    # torch sets this variable when other tests of this process import its compiler.
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    settings = {**inherited, "PYTHONPATH": str(ROOT), "TMPDIR": "", "HOME": "/root", **environ}
    settings = {name: value for name, value in settings.items() if value}
    lines = f"set -e\nhostname {name}\n{EMPTY_TMP}\nip link set lo up\n{setup}\n"
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", lines + 'exec "$@"', "sh", sys.executable, "-c", CODE, call],
        env=settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Outcome(*json.loads(done.stdout), done.stderr)


# A /tmp of its own, in which a checkout that is in /tmp is found again.
EMPTY_TMP = f"""exec 9<{ROOT}
mount -t tmpfs tmpfs /tmp
mkdir -p {ROOT}
mount --no-canonicalize --bind /proc/self/fd/9 {ROOT}
exec 9<&-"""
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--propagation", "private")
CHECK = "check_node(Path('/tmp'), 'localhost')"


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


@needs_root
def test_without_tmpdir_the_job_has_a_private_one():
    call = (
        f"({CHECK}, os.environ['TMPDIR'], oct(os.stat(os.environ['TMPDIR']).st_mode), __import__('tempfile').mkdtemp())"
    )
    found = on_node("", call, SLURM_JOB_ID="77")
    _, folder, mode, made = found.result
    assert (folder, mode) == (of_attempt("/tmp/rlhpc-0-77"), "0o40700")
    assert made.startswith(f"{folder}/")
    assert found.message == ""


@needs_root
def test_folders_of_old_jobs_are_removed_unless_a_process_holds_them():
    setup = """
    mkdir /tmp/rlhpc-0-1 /tmp/rlhpc-0-2 /tmp/rlhpc-0-3 /tmp/rlhpc-1-4 /tmp/rlhpc-0-5; mkdir /tmp/rlhpc-0-2/inductor
    touch -d "8 days ago" /tmp/rlhpc-0-1 /tmp/rlhpc-0-2 /tmp/rlhpc-1-4 /tmp/rlhpc-0-5
    chown 65534 /tmp/rlhpc-1-4
    exec 8</tmp/rlhpc-0-5; flock --shared 8
    """
    listing = f"({CHECK}, sorted(name for name in os.listdir('/tmp') if name.startswith('rlhpc-')))[1]"
    found = on_node(setup, listing, SLURM_JOB_ID="77")
    assert found.result == ["rlhpc-0-3", "rlhpc-0-5", "rlhpc-0-77", "rlhpc-1-4"]


LEFT = """
make() { mkdir -p -m 700 $1 $1/inductor $1/$2-$NODE/pymp-1; touch $1/$2-$NODE/socket; }
make $TOP/rlhpc-0-77 1; make $TOP/rlhpc-0-77 3; make $TOP/rlhpc-0-5 1; make $TOP/rlhpc-0-6 1; make $TOP/rlhpc-0-6 2
mkdir -p -m 700 $TOP/rlhpc-0-6/2-ffff $TOP/rlhpc-0-8/1-$NODE
exec 8<$TOP/rlhpc-0-6/2-$NODE; flock --shared 8
"""


@needs_root
@pytest.mark.parametrize("mode", ["1777", "0700"])
def test_what_killed_ranks_left_is_removed_by_the_next_attempt(mode):
    """Not what a process holds, another node made, or other jobs may be about to lock; caches stay."""
    node = of_attempt("", 0)[3:]
    setup = f"mkdir -m {mode} /tmp/top; TOP=/tmp/top; NODE={node}{LEFT}"
    age = "setattr(scratch, 'NEW_SECONDS', 0.0 if old else 60.0)"
    check = "check_node(Path('/tmp'), 'localhost', attempt=4)"
    found = "sorted(str(p.relative_to('/tmp/top')) for p in Path('/tmp/top').glob('rlhpc-*/*') if p.name[0].isdigit())"
    given = "os.environ.update(TMPDIR='/tmp/top')"
    call = f"[({age}, {given}, {check}, {found})[3] for old in (False, True)]"
    new, old = on_node(setup, call, TMPDIR="/tmp/top", SLURM_JOB_ID="77").result
    kept = [f"rlhpc-0-6/2-{node}", "rlhpc-0-6/2-ffff", f"rlhpc-0-77/4-{node}"]
    assert new == sorted([*kept, *(f"rlhpc-0-{job}/1-{node}" for job in (5, 6, 8))])
    assert old == kept


@needs_root
def test_the_folder_in_a_private_tmpdir_can_be_entered_by_whom_that_lets_in():
    """The user of programs in sandboxes; and caches stay beside it."""
    for mode, own in (("755", "0o40711"), ("700", "0o40700")):
        call = f"({CHECK}, oct(os.stat(os.environ['TMPDIR']).st_mode))[1]"
        found = on_node(f"mkdir -m {mode} /tmp/own", call, TMPDIR="/tmp/own", SLURM_JOB_ID="77")
        assert found.result == own
        assert found.environ["TMPDIR"] == of_attempt("/tmp/own/rlhpc-0-77")
        assert found.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/own/inductor"
    long = "/tmp/" + "x" * 50
    found = on_node(f"mkdir -m 700 {long}", CHECK, TMPDIR=long, SLURM_JOB_ID="77")
    assert found.environ["TMPDIR"] == long, "there is no room for another folder in its path"


@needs_root
@pytest.mark.parametrize("given", ["/tmp", "/tmp/scratch"])
def test_in_a_shared_tmpdir_no_other_user_can_make_a_folder_that_libraries_read(given):
    """Another user makes the cache folders of torch's compiler first, and the one that rlhpc would make."""
    setup = f"""
    mkdir -p {given}; chmod 1777 {given}
    setpriv --reuid 65534 --clear-groups mkdir -m 777 {given}/torchinductor_root {given}/cache {given}/rlhpc-0-77
    """
    call = f"({CHECK}, __import__('tempfile').gettempdir(), oct(os.stat(os.environ['TMPDIR']).st_mode))[1:]"
    found = on_node(setup, call, TMPDIR=given, HOME="/nowhere", SLURM_JOB_ID="77")
    tmpdir, mode = found.result
    own = os.path.dirname(tmpdir)
    assert (tmpdir, mode) == (found.environ["TMPDIR"], "0o40700")
    assert own.startswith(f"{given}/rlhpc-"), "the file system that was chosen"
    assert own != f"{given}/rlhpc-0-77"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE"):
        assert found.environ[name].startswith(f"{own}/")


@needs_root
@pytest.mark.parametrize("made", ["/tmp/torchinductor_root", "/tmp/other"])
def test_an_inherited_cache_that_another_user_can_make_is_not_used(made):
    setup = f"chmod 1777 /tmp; setpriv --reuid 65534 --clear-groups mkdir -m 755 {made}; mkdir /tmp/mine"
    inherited = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_root", "TRITON_CACHE_DIR": "/tmp/mine/triton"}
    found = on_node(setup, CHECK, SLURM_JOB_ID="77", **inherited)
    assert found.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/rlhpc-0-77/inductor"
    assert found.environ["TRITON_CACHE_DIR"] == "/tmp/mine/triton"
    assert "TORCHINDUCTOR_CACHE_DIR '/tmp/torchinductor_root' may be another user's; /tmp/rlhpc-0-77/" in found.message


@needs_root
def test_later_attempts_of_a_job_find_its_caches():
    setup = "mkdir -m 1777 /tmp/scratch; mkdir -m 700 /tmp/scratch/rlhpc-0-77 /tmp/scratch/rlhpc-0-77/inductor"
    found = on_node(setup, CHECK, TMPDIR="/tmp/scratch", SLURM_JOB_ID="77")
    assert found.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/scratch/rlhpc-0-77/inductor"


@needs_root
def test_a_shared_tmpdir_without_room_for_a_longer_path_is_replaced():
    given = "/tmp/" + "x" * 50
    found = on_node(f"mkdir -m 1777 {given}", CHECK, TMPDIR=given, SLURM_JOB_ID="77")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
    assert "is shared, and too long for a private folder in it (at most 60); /tmp/rlhpc-0-77 is used" in found.message


@needs_root
@pytest.mark.parametrize(
    ("setup", "given", "why"),
    [
        (
            "mkdir -p /tmp/" + "x" * 60,
            "/tmp/" + "x" * 60,
            "is too long for unix sockets (65 characters, at most 60)",
        ),
        ("", "/tmp/gone", "does not exist"),
        ("mkdir /tmp/ro; mount -t tmpfs -o ro tmpfs /tmp/ro", "/tmp/ro", "is not writable (Read-only file system)"),
        (
            "mkdir /tmp/small; mount -t tmpfs -o size=8m tmpfs /tmp/small",
            "/tmp/small",
            "has only 8 MiB free of the 64 that its ranks need",
        ),
        (
            "mkdir /tmp/few; mount -t tmpfs -o nr_inodes=20 tmpfs /tmp/few",
            "/tmp/few",
            "has room for only 19 more files",
        ),
    ],
)
def test_a_tmpdir_that_programs_cannot_use_is_replaced_with_a_warning(setup, given, why):
    found = on_node(setup, CHECK, TMPDIR=given, SLURM_JOB_ID="77")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
    assert found.message == f"rlhpc: node localhost: TMPDIR {given!r} {why}; /tmp/rlhpc-0-77 is used instead\n"


@needs_root
def test_only_one_rank_of_a_node_tells():
    call = "check_node(Path('/tmp'), 'localhost', local_rank=1)"
    found = on_node("", call, TMPDIR="/tmp/gone", HOME="/nowhere", SLURM_JOB_ID="77")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
    assert found.message == ""


@needs_root
@pytest.mark.parametrize(
    "squat",
    [
        "mkdir -m 700 /tmp/rlhpc-0-77; chown 65534 /tmp/rlhpc-0-77",
        "mkdir -m 777 /tmp/rlhpc-0-77",
        "mkdir -m 700 /tmp/own; ln -s /tmp/own /tmp/rlhpc-0-77",
        "touch /tmp/rlhpc-0-77",
    ],
)
def test_a_folder_that_somebody_else_put_there_is_not_used(squat):
    found = on_node(squat, CHECK, SLURM_JOB_ID="77")
    assert found.error == ""
    assert found.environ["TMPDIR"].startswith("/tmp/rlhpc-")
    assert not found.environ["TMPDIR"].startswith("/tmp/rlhpc-0-77")


@needs_root
def test_without_any_folder_for_temporary_files():
    setup = "mount -t tmpfs tmpfs /mnt; mkdir /mnt/run; mount -o remount,ro /tmp"
    found = on_node(setup, CHECK.replace("/tmp", "/mnt/run"), SLURM_JOB_ID="77")
    assert found.error.startswith(
        "node localhost: /tmp/rlhpc-0-77 cannot be created (Read-only file system); set TMPDIR in"
    )


READ_ONLY_HOME = "mkdir /tmp/home; mount -t tmpfs -o ro tmpfs /tmp/home"


@needs_root
@pytest.mark.parametrize(
    ("setup", "home", "why", "own"),
    [
        ("", "/home/nowhere", "does not exist", {}),
        (READ_ONLY_HOME, "/tmp/home", "is not writable (Read-only file system)", {}),
        (READ_ONLY_HOME, "/tmp/home", "is not writable (Read-only file system)", {"RLHPC_CODE": "/work"}),
    ],
    ids=["none", "read-only", "read-only in a container"],
)
def test_caches_leave_a_home_folder_that_cannot_take_them(setup, home, why, own):
    own |= {"SLURM_JOB_ID": "77", "TRITON_CACHE_DIR": "/elsewhere", "XDG_CACHE_HOME": ""}
    found = on_node(setup, CHECK, HOME=home, **own)
    assert found.message == f"rlhpc: node localhost: the home folder {home!r} {why}; caches go to /tmp/rlhpc-0-77\n"
    assert found.environ["XDG_CACHE_HOME"] == "/tmp/rlhpc-0-77/cache"
    assert found.environ["CUDA_CACHE_PATH"] == "/tmp/rlhpc-0-77/cuda"
    assert found.environ["TRITON_CACHE_DIR"] == "/elsewhere", "what the user has set is kept"
    leaves = why == "does not exist" or "RLHPC_CODE" in own
    assert found.environ["HOME"] == ("/tmp/rlhpc-0-77/home" if leaves else home)


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
