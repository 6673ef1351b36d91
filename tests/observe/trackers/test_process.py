"""The process beside the ranks: ends with its launcher, reports a failure once, and delays no run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.saved import save_config
from rlhpc.core.folder import RunFolder
from rlhpc.launch.supervise.side_processes import TrackerProcess
from rlhpc.observe.trackers.__main__ import main
from tests.helpers.runs import write_config
from tests.helpers.waiting import until
from tests.observe.trackers.steps import append, new_run, record, replace, steps
from tests.observe.trackers.test_tensorboard import check

pytestmark = pytest.mark.workers

OWN = """
import time
from pathlib import Path

def slow(run, fault):
    def log(steps):
        if fault == "blocks":
            time.sleep(1000)
        if fault == "dies":
            import os; os._exit(7)
        if fault == "fails" and not Path("repaired").exists():
            raise RuntimeError("password=hunter2abc is wrong")
        with open(run.folder.trackers.files(run.tracker), "a") as out:
            out.writelines(f"{step.phase} {step.step}\\n" for step in steps)
    return log
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return new_run(tmp_path)


def start(folder: RunFolder, fault: str = "", trackers: Sequence[dict] = ()) -> TrackerProcess:
    """The process for TensorBoard and, with a fault, a tracker of the user's own."""
    Path("slow.py").write_text(OWN)
    own = [{"function": "slow:slow", "arguments": {"fault": fault}}] if fault else []
    config = load_config(write_config(folder.path.parent, observe={"trackers": [*own, *trackers]}))
    save_config(folder, config)
    return TrackerProcess(folder, config)


def seen(folder: RunFolder, place: int) -> bool:
    state = folder.trackers.state("tensorboard")
    return state.exists() and f'"step": {place}' in state.read_text()


def test_all_steps_are_delivered_at_the_end(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    process = start(folder)
    append(folder, steps(3, 2))
    until(lambda: seen(folder, 2))
    kept = steps(3, 1)
    replace(folder, kept)
    again = [record("rl", step, 2000.0) for step in range(2, 40)]
    append(folder, again)
    process.end()
    check(folder, [*kept, *again])
    assert capfd.readouterr().err == ""


def test_without_trackers_nothing_is_started(folder: RunFolder):
    config = load_config(write_config(folder.path.parent, observe={"tensorboard": False}))
    process = TrackerProcess(folder, config)
    process.end()
    assert not folder.trackers.path.exists()


def test_it_ends_with_its_launcher(folder: RunFolder):
    """Even if the launcher is killed: its end of the pipe is closed."""
    append(folder, steps(3, 2))
    code = (
        "import sys, time; from pathlib import Path; from rlhpc.core.folder import RunFolder;"
        "from rlhpc.launch.supervise import side_processes; "
        "print(side_processes._start(RunFolder(Path(sys.argv[1])), ['tensorboard']).pid, flush=True); time.sleep(600)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    launcher = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, env=environ)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    launcher.kill()
    launcher.stdout.read()  # until its children have closed it too
    launcher.wait()
    launcher.stdout.close()
    until(lambda: not Path(f"/proc/{child}/cmdline").exists())
    check(folder, steps(3, 2))


def test_a_killed_process_is_reported_once_and_the_next_one_continues(
    folder: RunFolder, capfd: pytest.CaptureFixture[str]
):
    process = start(folder)
    append(folder, steps(3, 5))
    until(lambda: seen(folder, 5))
    assert process.process is not None
    os.killpg(process.process.pid, signal.SIGKILL)
    until(lambda: process.process.poll() is not None)
    append(folder, [record("rl", step) for step in range(6, 9)])
    process.end()
    err = capfd.readouterr().err
    assert err.count("rlhpc: warning: the process of the trackers was killed by signal 9") == 1, err
    assert f"send what is missing after the run: python -m rlhpc.observe.trackers {folder.path}" in err
    start(folder).end()
    check(folder, steps(3, 8))


def test_a_tracker_that_blocks_delays_neither_others_nor_the_end(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    process = start(folder, "blocks")
    append(folder, steps(3, 5))
    until(lambda: seen(folder, 5))
    append(folder, [record("rl", 6)])
    began = time.monotonic()
    process.end(2.0)
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err.count("has not delivered the last steps within 2 s") == 1
    check(folder, steps(3, 6))


def test_a_server_that_hangs_delays_neither_others_nor_the_end(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    """MLflow's client waits for a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = start(folder, trackers=[{"kind": "mlflow", "uri": uri}])
        append(folder, steps(3, 5))
        server.settimeout(120.0)
        with server.accept()[0]:
            until(lambda: seen(folder, 5))
            append(folder, [record("rl", 6)])
            began = time.monotonic()
            process.end(2.0)
            assert time.monotonic() - began < 10
    assert "has not delivered the last steps within 2 s" in capfd.readouterr().err
    check(folder, steps(3, 6))


def test_a_tracker_that_fails_is_reported_once_and_catches_up(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    process = start(folder, "fails")
    append(folder, steps(3, 5))
    until(lambda: seen(folder, 5))
    until(lambda: "own" in folder.trackers.log.read_text())
    Path("repaired").touch()
    append(folder, [record("rl", 6)])
    process.end()
    taken = folder.trackers.files("own").read_text().split("\n")[:-1]
    assert taken == [*(f"sft {step}" for step in (1, 2, 3)), *(f"rl {step}" for step in range(7))]
    (line,) = capfd.readouterr().err.splitlines()
    assert "tracker own failed: RuntimeError: password=*** is wrong; send what is missing" in line


def test_a_tracker_that_ends_the_process_is_reported_once(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    process = start(folder, "dies")
    append(folder, steps(3, 5))
    assert process.process is not None
    until(lambda: process.process.poll() is not None)
    until(lambda: "ended with exit code 7" in capfd.readouterr().err)
    process.end()
    assert capfd.readouterr().err == ""


def test_tensorboard_alone_loads_neither_torch_nor_the_configuration(folder: RunFolder):
    append(folder, steps(3, 2))
    code = (
        "import os, sys; from rlhpc.observe.trackers import __main__ as module;"
        "module.END_SECONDS, os._exit = 120.0, sys.exit\n"
        "try: module.main(['--follow', sys.argv[1], 'tensorboard'])\n"
        "finally: print({'torch', 'pydantic', 'tensorflow'} & {*sys.modules}, flush=True)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code, str(folder.path)], stdin=subprocess.DEVNULL, env=environ, check=True)
    assert folder.trackers.log.read_text() == "set()\n"
    check(folder, steps(3, 2))


def test_by_hand_it_sends_what_trackers_lack(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    Path("slow.py").write_text(OWN)
    trackers = [{"function": "slow:slow", "arguments": {"fault": "fails"}}]
    save_config(folder, load_config(write_config(folder.path.parent, observe={"trackers": trackers})))
    append(folder, steps(3, 2))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "rlhpc.observe.trackers", str(folder.path)]
    assert subprocess.run(command, env=environ).returncode == 2
    failure = "tracker own failed: RuntimeError: password=*** is wrong; remove the cause and send again"
    assert capfd.readouterr() == ("tensorboard: has all steps\n", f"rlhpc: {failure}\n")
    Path("repaired").touch()
    for _ in range(2):
        assert main([str(folder.path), "own"]) == 0
        assert capfd.readouterr() == ("own: has all steps\n", "")
    assert len(folder.trackers.files("own").read_text().splitlines()) == 6
    check(folder, steps(3, 2))


def test_by_hand_an_error_is_one_line(folder: RunFolder, capfd: pytest.CaptureFixture[str]):
    def error(*names: str) -> str:
        assert main([str(folder.path), *names]) == 2
        return capfd.readouterr().err

    assert error() == f"rlhpc: {folder.config}: no such file; give the path of a configuration\n"
    config = write_config(folder.path.parent, observe={"trackers": [{"kind": "wandb"}]})
    save_config(folder, load_config(config))
    assert error("wandp") == "rlhpc: wandp: no such tracker; did you mean 'wandb'?\n"
    save_config(folder, load_config(config, ["observe.trackers=[]", "observe.tensorboard=false"]))
    assert error() == f"rlhpc: {folder.config}: no trackers; set observe.trackers in it\n"
