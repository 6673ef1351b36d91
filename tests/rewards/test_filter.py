"""What a program can do where only the filter of system calls confines it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rewards.users import (
    AS_NOBODY,
    AS_ROOT_OF_A_NAMESPACE,
    NOBODY,
    PYTHON,
    ROOT,
    needs_python,
    needs_root,
    run_as,
)

pytestmark = [needs_python]


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files; another user's processes can enter it too."""
    with tempfile.TemporaryDirectory(prefix="public-", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of nobody."""
    process = subprocess.Popen(["sleep", "1000"], user=NOBODY, group=NOBODY, extra_groups=[])
    yield process
    process.kill()
    process.wait()


# Each prints what it was refused with; what the first does kills the other process when the pipe has data.
_ATTACKS = """
import ctypes, fcntl, os, resource, socket, struct, sys
other = {other}
libc = ctypes.CDLL(None, use_errno=True)
reading, writing = os.pipe()
pair = socket.socketpair
def own_pipe():
    for command, value in ((fcntl.F_SETSIG, 9), (fcntl.F_SETOWN, other), (fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)):
        fcntl.fcntl(reading, command, value)
    os.write(writing, b"x")
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
attacks = {{
    "setown": own_pipe,
    "setown_ex": lambda: fcntl.fcntl(reading, 15, struct.pack("ii", 1, other)),
    "async": lambda: fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC),
    "fiosetown": lambda: fcntl.ioctl(reading, 0x8901, struct.pack("i", other)),
    "fioasync": lambda: fcntl.ioctl(reading, 0x5452, struct.pack("i", 1)),
    "prlimit": lambda: resource.prlimit(other, resource.RLIMIT_NOFILE, (0, 0)),
    "affinity": lambda: os.sched_setaffinity(other, {{min(os.sched_getaffinity(other))}}),
    "scheduler": lambda: os.sched_setscheduler(other, os.SCHED_BATCH, os.sched_param(0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, other, 19),
    "priority of all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "kill": lambda: os.kill(other, 9),
    "kill all": lambda: os.kill(-1, 9),
    "pidfd": lambda: os.pidfd_open(other),
    "pidfd_getfd": lambda: call(438, 9, 0, 0),
    "lease": lambda: fcntl.fcntl(reading, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "inotify": lambda: call({inotify}, 0),
    "aio": lambda: call({aio}, 9, ctypes.byref(ctypes.c_long())),
    "pipe": lambda: fcntl.fcntl(writing, 1031, 1 << 20),
    "unknown": lambda: call(460),
}}
for name, attack in attacks.items():
    try:
        attack()
    except OSError as error:
        if error.errno not in (1, 38):
            print(name, error)
    else:
        print(name, "done")
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (60, 60))
resource.setrlimit(resource.RLIMIT_NOFILE, (59, 59))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.nice(1)
fcntl.fcntl(reading, fcntl.F_SETFL, os.O_NONBLOCK)
print("own")
"""


@needs_root
def test_other_processes_of_the_user_are_out_of_reach(neighbour, public):
    arm = os.uname().machine == "aarch64"
    numbers = {"inotify": 26, "aio": 0} if arm else {"inotify": 294, "aio": 206}
    limits = Path(f"/proc/{neighbour.pid}/limits")
    before = (limits.read_text(), os.getpriority(os.PRIO_PROCESS, neighbour.pid))
    ((code, output, errors),) = run_as(AS_NOBODY, _ATTACKS.format(other=neighbour.pid, **numbers))
    assert (code, output) == (0, "own\n"), errors
    assert neighbour.poll() is None
    assert (limits.read_text(), os.getpriority(os.PRIO_PROCESS, neighbour.pid)) == before
    assert os.sched_getaffinity(neighbour.pid) == os.sched_getaffinity(0)


_LOOKS = """
for name in ("environ", "mem", "maps"):
    try:
        print(name, len(open("/proc/{other}/" + name, "rb").read(1)))
    except OSError as error:
        print(type(error).__name__)
"""


@needs_root
def test_memory_and_environment_of_other_processes_are_closed_where_landlock_is(neighbour, public):
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("a kernel without Landlock")
    ((code, output, errors),) = run_as(AS_NOBODY, _LOOKS.format(other=neighbour.pid))
    assert (code, output.split()) == (0, ["PermissionError"] * 3), errors


_WHO = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
rights = {status[name].strip("0\\t\\n") for name in ("CapInh", "CapPrm", "CapEff")}
print(os.getresuid(), os.getresgid(), os.getgroups(), rights)
try:
    open("/etc/shadow")
except OSError as error:
    print(type(error).__name__)
open("own", "w").write("x")
print(os.stat("own").st_uid)
"""


@pytest.mark.heavy
@needs_root
@pytest.mark.parametrize(
    ("prepare", "user", "own"),
    [("", NOBODY, NOBODY), (AS_ROOT_OF_A_NAMESPACE, 0, 0), (AS_NOBODY, NOBODY, NOBODY)],
    ids=["root", "root of a namespace", "nobody"],
)
def test_a_program_of_root_is_nobody_s(public, prepare: str, user: int, own: int):
    """An ordinary user who is root in a namespace of his own keeps no capabilities there."""
    ((code, output, errors),) = run_as(prepare, _WHO)
    groups = output.split("[")[1].split("]")[0] if prepare == AS_ROOT_OF_A_NAMESPACE else ""
    who = f"{(user,) * 3} {(user,) * 3} [{groups}] {{''}}"
    assert (code, output) == (0, f"{who}\nPermissionError\n{own}\n"), errors


@needs_root
@pytest.mark.parametrize(
    "setting",
    [
        ("setpriv", "--bounding-set=-setuid,-setgid"),
        ("unshare", "--user", "--map-root-user"),
    ],
)
def test_a_root_that_cannot_become_nobody_is_refused(public, setting: tuple[str, ...]):
    (error,) = run_as("", "print(1)", setting=setting)
    assert "root's programs run as nobody" in error
    (error,) = run_as("", setting=setting)
    assert "nobody" in error
    assert "use isolation: namespaces" in error


@pytest.mark.heavy
def test_the_folder_is_bounded_in_bytes_files_and_depth(public):
    """And is gone afterwards, at any depth."""
    files = "import os\nfor n in range(1000): open(str(n), 'wb').write(bytes(8 << 20))"
    deleted = "import os\nkeep = []\nfor n in range(50):\n    keep.append(open('x', 'wb'))\n    os.unlink('x')\n"
    deleted += "    keep[-1].write(bytes(8 << 20))\n    keep[-1].flush()\nimport time\ntime.sleep(100)"
    small = "for n in range(10**6): open(str(n), 'wb').close()"
    deep = "import os\nwhile True:\n    os.mkdir('a')\n    os.chdir('a')"
    fits = "import tempfile\nwith tempfile.TemporaryDirectory() as f: open(f + '/x', 'wb').write(bytes(8 << 20))\n"
    fits += "import os\nfor n in range(50):\n    os.mkdir('a')\n    os.chdir('a')"
    ended = run_as("", files, deleted, small, deep, fits, folder_mib=16)
    assert [(code, errors) for code, _, errors in ended] == [(-9, "")] * 4 + [(0, "")]
    assert not list(public.iterdir())


@pytest.mark.heavy
@pytest.mark.parametrize("prepare", ["", pytest.param(AS_NOBODY, marks=needs_root)], ids=["self", "nobody"])
def test_a_folder_deeper_than_the_stack_is_removed(public, prepare: str):
    """Made faster than it is measured."""
    deep = "import os\nfor n in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\nos.chmod('.', 0)"
    run_as(prepare, deep)
    assert not list(public.iterdir())


@pytest.mark.heavy
def test_threads_are_bounded(public):
    program = (
        "import threading, time\nfor n in range({}):\n    threading.Thread(target=time.sleep, args=(1,)).start()\n"
    )
    ended = run_as("", program.format(7), program.format(30), processes=8)
    assert [code for code, *_ in ended] == [0, -9]


# Runs tests apart from their solution in a worker that is slow to close what it holds: the solution ends, and its
# sandbox is removing the folder when it is asked to end.
_APART = """
import os, sys, time
from rlhpc.rewards import code, folder
close, remove, worker = os.close, folder.remove, os.getpid()
def close_slowly(descriptor):
    close(descriptor)
    if os.getpid() == worker:
        time.sleep(0.1)
def remove_slowly(path):
    if os.getpid() != worker:
        time.sleep(0.5)
    remove(path)
os.close, folder.remove = close_slowly, remove_slowly
sys._base_executable = sys.argv[1]
solution = "```python\\nx = 1\\n```"
print(code.python("", solution, ["assert x == 1"], {}, isolation="filter", seconds=10.0, total_seconds=30.0)["score"])
"""


@pytest.mark.heavy
def test_the_folder_of_a_solution_goes_though_the_tests_end_meanwhile(public):
    command = [sys.executable, "-c", _APART, PYTHON]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("1.0\n", "")
    assert not list(public.iterdir())
