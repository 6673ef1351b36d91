"""What a program in the sandbox can reach: nothing but its folder, for as long as it may run."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhpc.core.errors import UserError
from rlhpc.rewards.sandbox import Limits, Sandbox, interpreter_libraries
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]
ROOMY = Limits(seconds=20, memory_mib=256)  # the machine may be busy


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(ROOMY)


@pytest.fixture
def brief() -> Sandbox:
    """Of a second of processor time, three by the clock."""
    return Sandbox(Limits(seconds=1, memory_mib=256))


def tried(*attempts: str) -> str:
    """A program that prints, for each of the expressions, its value or the name of its error."""
    lines = ["import ctypes, os, signal, socket, subprocess, sys", "libc = ctypes.CDLL(None)", "def attempt(code):"]
    lines += ["    try:", "        print(eval(code))", "    except Exception as error:"]
    lines += ["        print(type(error).__name__)"]
    return "\n".join([*lines, *(f"attempt({attempt!r})" for attempt in attempts)])


def lines_of(sandbox: Sandbox, *attempts: str) -> list[str]:
    ended = sandbox.run(tried(*attempts))
    assert ended.code == 0, ended.errors
    return ended.output.splitlines()


def programs() -> list[psutil.Process]:
    """Processes of sandboxes on this machine."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[-1] == "/tmp/solution.py"]


def none_left() -> None:
    until(lambda: not programs(), "the end of all programs", lambda: str(programs()))


def test_a_program_reads_prints_and_ends(sandbox):
    ended = sandbox.run("import sys\nprint(input() * 2)\nprint('no', file=sys.stderr)\nsys.exit(7)", "ab\n")
    assert (ended.code, ended.output, ended.errors) == (7, "abab\n", "no\n")
    assert sandbox.run("import os\nos.abort()").code == -6
    assert sandbox.run("import os\nos.kill(os.getpid(), 15)").code == -15


def test_the_mask_of_a_job_does_not_hide_the_interpreter(sandbox):
    mask = os.umask(0o077)
    try:
        assert sandbox.run("import json\nprint(open(__file__).read()[:6])").output == "import\n"
    finally:
        os.umask(mask)


def test_its_environment_and_rights_are_its_own(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    secret, user, ids, descriptors = lines_of(
        Sandbox(ROOMY),
        "os.environ.get('SECRET')",
        "os.getresuid() + os.getresgid() + tuple(os.getgroups())[:0]",
        "os.getpid() < 10, os.getppid()",
        "[d for d in range(3, 64) if libc.fcntl(d, 1) >= 0]",
    )
    assert secret == "None"
    assert user == str((1000,) * 6)
    assert ids == "(True, 1)"
    assert descriptors == "[]"


def test_nothing_of_the_machine_can_be_read_but_the_interpreter(sandbox, tmp_path):
    (tmp_path / "secret").write_text("x")
    found = lines_of(
        sandbox,
        f"open({str(tmp_path / 'secret')!r})",
        f"os.listdir({str(ROOT)!r})",
        "open('/proc/1/environ')",
        "os.listdir('/proc/self')",
        "os.listdir('/sys')",
        "open('/etc/passwd')",
        "sorted(os.listdir('/dev'))",
    )
    assert found == ["FileNotFoundError"] * 6 + ["['null', 'random', 'urandom', 'zero']"]


def test_a_library_in_the_user_s_own_folder_does_not_show_that_folder(monkeypatch):
    """As one that is preloaded may be."""
    folders = interpreter_libraries()
    monkeypatch.setenv("HOME", folders[0])
    assert interpreter_libraries() == folders[1:]
    monkeypatch.setenv("HOME", f"{folders[0]}/below")
    assert interpreter_libraries() == folders[1:]


def test_files_are_written_in_a_folder_that_goes(sandbox, tmp_path):
    before = set(os.listdir("/tmp"))
    found = lines_of(
        sandbox,
        "open('own', 'w').write('abc')",
        "open('/tmp/own').read()",
        f"open({str(tmp_path / 'file')!r}, 'w')",
        "open('/usr/file', 'w')",
        f"open({os.path.join(sys.base_prefix, 'file')!r}, 'w')",
        "os.chmod('/usr', 0o777)",
        "os.mkdir('/dev/shm')",
        "open('/dev/null', 'w').write('x')",
    )
    assert found[:3] == ["3", "abc", "FileNotFoundError"]
    assert found[3:6] == ["OSError"] * 3  # a read-only file system
    assert found[6] in ("PermissionError", "None")  # in memory, too
    assert found[7] == "1"
    assert not {"own", "file"} & (set(os.listdir("/tmp")) - before)
    assert lines_of(sandbox, "os.listdir('/tmp')") == ["['solution.py']"]


@pytest.mark.heavy
def test_the_folder_and_files_are_bounded(sandbox):
    fill = "for n in range(100):\n    open(str(n), 'wb').write(bytes(8 << 20))"
    ended = sandbox.run(fill)
    assert "No space left on device" in ended.errors
    assert "File too large" in sandbox.run("open('big', 'wb').write(bytes(100 << 20))").errors
    ended = sandbox.run("print('x' * (100 << 20))")
    assert len(ended.output) <= ROOMY.file_mib << 20
    assert ended.code == 1


def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(b"\0of-a-neighbour")
        unix.listen()
        port = tcp.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it can be reached from here
        found = lines_of(
            sandbox,
            f"socket.create_connection(('127.0.0.1', {port}), 5)",
            "socket.create_connection(('1.1.1.1', 53), 5)",
            "socket.getaddrinfo('example.org', 80)",
            "socket.socket(socket.AF_UNIX).connect(b'\\0of-a-neighbour')",
            "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
            "socket.socket(38)",  # AF_ALG, the kernel's cryptography
        )
    assert found == ["OSError", "OSError", "gaierror", "ConnectionRefusedError", "OSError", "OSError"]


def test_no_other_process_can_be_harmed(sandbox):
    found = lines_of(
        sandbox,
        f"os.kill({os.getpid()}, 9)",
        "[libc.kill(1, 9), libc.ptrace(16, 1, 0, 0)][1]",
        "os.kill(-1, 15)",
        "os.setuid(0)",
        "libc.unshare(0x10000000)",
        "libc.mount(b'none', b'/usr', b'tmpfs', 0, 0)",
        "'alive'",
    )
    assert found == ["ProcessLookupError", "-1", "ProcessLookupError", found[3], "-1", "-1", "alive"]
    assert found[3] in ("PermissionError", "OSError")


_CLONE = {"x86_64": 56}.get(platform.machine(), 220)
_MEMORY_OF_NOBODY = (
    "libc.shmget(0, 1 << 20, 0o1600)",
    "libc.semget(0, 9, 0o1600)",
    "libc.msgget(0, 0o1600)",
    "os.memfd_create('m')",
)


def test_memory_that_no_limit_counts_and_further_namespaces_are_not_had(sandbox):
    """As the program's own user too, whom the kernel refuses no namespace."""
    attempts = (
        *_MEMORY_OF_NOBODY,
        f"libc.syscall({_CLONE}, 0x10000011, 0, 0, 0, 0) or os._exit(0)",
        "libc.syscall(430, b'tmpfs', 0)",  # fsopen
        "libc.prctl(1, 0)",
        "__import__('threading').Thread(target=print).start()",
        "subprocess.run(['true']).returncode",
    )
    denied = ["-1", "-1", "-1", "PermissionError", "-1", "-1", "-1", "", "None", "0"]
    assert lines_of(sandbox, *attempts) == denied


def test_ten_gigabytes_are_not_had(sandbox):
    ended = sandbox.run("x = bytearray(10 << 30)")
    assert ended.code == 1
    assert "MemoryError" in ended.errors


@pytest.mark.workers
def test_loops_and_sleeps_end_in_time(sandbox, brief):
    for program, codes in (("while True: pass", (-9, None)), ("import time\ntime.sleep(1000)", (None,))):
        ended = brief.run(program)
        assert ended.code in codes
        assert ended.seconds < 100
    assert sandbox.run("import time\ntime.sleep(1000)", within=0.5).seconds < 3 * ROOMY.seconds


@pytest.mark.workers
def test_a_fork_bomb_is_small_and_leaves_nothing():
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    process = subprocess.Popen([sys.executable, "-c", _RUN, "100", bomb], cwd=ROOT)
    until(lambda: len(programs()) > 2, "the bomb")
    most = max(len(programs()) for _ in range(20))
    process.kill()
    process.wait()
    assert most < 2 * Limits().processes, "some end while others are counted"
    none_left()


def test_what_a_program_leaves_behind_ends_with_it(sandbox):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
    ended = sandbox.run(f"{daemon}else:\n    print('ends')")
    assert (ended.code, ended.output) == (0, "ends\n")
    none_left()


def test_a_program_ends_with_the_process_that_runs_it():
    process = subprocess.Popen([sys.executable, "-c", _RUN, "100", "import time\ntime.sleep(1000)"], cwd=ROOT)
    until(programs, "the program")
    process.kill()
    process.wait()
    none_left()


def test_installed_packages_are_seen_if_asked_for():
    program = "import numpy\nprint(int(numpy.arange(4).sum()))"
    assert "ModuleNotFoundError" in Sandbox(ROOMY).run(program).errors
    ended = Sandbox(Limits(seconds=20, memory_mib=1024), packages=True).run(program)
    assert ended.output == "6\n", ended.errors


def test_further_paths_can_be_read_and_not_written(tmp_path):
    (tmp_path / "table").write_text("x")
    table = str(tmp_path / "table")
    tmp_path.chmod(0o755)  # root's programs run as nobody
    os.chmod(table, 0o666)
    sandbox = Sandbox(ROOMY, paths=[str(tmp_path)])
    assert lines_of(sandbox, f"open({table!r}).read()", f"open({table!r}, 'a')") == ["x", "OSError"]


# ---- machines of other kinds

_RUN = (
    "import sys\n"
    "from rlhpc.rewards.sandbox import Limits, Sandbox\n"
    "print(Sandbox(Limits(seconds=float(sys.argv[1])), *sys.argv[3:]).run(sys.argv[2]).code)\n"
)
_CHECK = (
    "import sys\n"
    "from rlhpc.rewards.sandbox import Limits, Sandbox\n"
    "sandbox = Sandbox(Limits(seconds=20), *sys.argv[2:])\n"
    "sandbox.check()\n"
    "print(sandbox.run(sys.argv[1]).output, end='')\n"
)


def elsewhere(setting: list[str], program: str, *isolation: str) -> subprocess.CompletedProcess[str]:
    command = [*setting, sys.executable, "-c", _CHECK, program, *isolation]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# In a namespace where this user is number 1000 and has no rights, as on a node of a cluster.
_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


def test_a_user_without_rights_has_the_same_sandbox(tmp_path):
    attempts = tried(
        "os.getuid()",
        "open('/etc/passwd')",
        "open('/usr/file', 'w')",
        "socket.create_connection(('127.0.0.1', 22), 5)",
        "libc.ptrace(16, 1, 0, 0)",
    )
    done = elsewhere(_USER, attempts)
    assert done.stdout.splitlines() == ["1000", "FileNotFoundError", "OSError", "OSError", "-1"], done.stderr


_NO_NAMESPACES = ["unshare", "--user", "--map-root-user", "sh", "-c"]
_NO_NAMESPACES += ['echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]


def test_a_machine_without_namespaces_is_refused_with_the_remedy():
    done = elsewhere(_NO_NAMESPACES, "print(1)")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert "UserError: this machine allows no sandbox: " in line
    assert "unshare: No space left on device; have an administrator set the sysctl user.max_user_namespaces" in line
    assert "set isolation: filter" in line


def test_a_filter_of_system_calls_holds_what_it_can():
    attempts = tried(
        "os.environ.get('HOME') == os.environ.get('TMPDIR') == os.getcwd()",
        "os.fork()",
        "subprocess.run(['true'])",
        "os.kill(os.getppid(), 0)",
        "libc.syscall(424, 0, 0, 0, 0)",  # pidfd_send_signal
        "os.kill(os.getpid(), 0)",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "bytearray(10 << 30)",
        "__import__('threading').Thread(target=print).start()",
        "libc.prctl(1, 0)",  # to be killed with its parent no more
    )
    done = elsewhere(_USER, attempts, "filter")
    denied = ["BlockingIOError", "BlockingIOError", "PermissionError", "-1", "None", "OSError", "OSError"]
    assert done.stdout.split() == ["True", *denied, "MemoryError", "None", "-1"], done.stderr


def test_an_interpreter_that_cannot_start_is_reported():
    with pytest.raises(UserError, match=r"Python does not start in the sandbox: exit code .*; raise memory_mib"):
        Sandbox(Limits(memory_mib=4)).check()
