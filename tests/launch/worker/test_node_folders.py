"""Folders for temporary files and caches on a node: private, with room, and removed after use."""

import os

import pytest

from tests.launch.worker.made_nodes import CHECK, needs_root, of_attempt, on_node


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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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
