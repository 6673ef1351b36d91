"""Real ranks on this machine: success, every way to fail, and nobody left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlhpc.config.load import dump_config, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.attempts import folders, read_attempt, read_verdict
from rlhpc.core.errors import UserError
from rlhpc.core.exits import StartRecord, read_exits, read_starts
from rlhpc.core.folder import RunFolder
from rlhpc.core.process import ProcessId
from rlhpc.launch.runs.submit import check_free
from rlhpc.launch.supervise import local, supervisor
from rlhpc.launch.supervise.local import ChildRanks, run_local
from rlhpc.observe.page.collect import page_data
from tests.helpers.waiting import until
from tests.launch.programs import HANG_SECONDS

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[3]
PROGRAMS = "tests.launch.programs"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # ranks import the programs from there


def make_config(folder: Path, ranks: int) -> RunConfig:
    file = folder / "given.yaml"
    file.write_text(f"name: tiny\nmodel: {{path: none}}\ntrain: {{steps: 1}}\nresources: {{ranks_per_node: {ranks}}}\n")
    return load_config(file)


def starts(run: RunFolder) -> dict[int, StartRecord]:
    """Of the newest attempt."""
    found = folders(run)
    return read_starts(found[-1].exits) if found else {}


def launch(folder: Path, program: str, ranks: int, resume: bool = False) -> int:
    run = RunFolder(folder / "run")
    try:
        return run_local(make_config(folder, ranks), run, resume=resume, entry=f"{PROGRAMS}:{program}")
    finally:
        assert not [start for start in starts(run).values() if start.process.is_alive()]


def test_ranks_run_with_their_environment_and_the_launcher_keeps_its_own(tmp_path, capsys):
    before = dict(os.environ)
    assert launch(tmp_path, "write_environment", 2) == 0
    assert dict(os.environ) == before
    seen = [json.loads((tmp_path / "run" / f"environment-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(s["RANK"], s["WORLD_SIZE"], s["LOCAL_RANK"]) for s in seen] == [("0", "2", "0"), ("1", "2", "1")]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != ""
    assert seen[0]["RLHPC_STORE"] == seen[1]["RLHPC_STORE"]
    secret = seen[0]["RLHPC_STORE_SECRET"].encode()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and "environment-" not in file.name]
    assert not [file for file in files if secret in file.read_bytes()], "it is in no file of the run"
    assert seen[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert seen[0]["HF_HUB_OFFLINE"] == "1"
    assert seen[0].get("CUDA_VISIBLE_DEVICES") == before.get("CUDA_VISIBLE_DEVICES")
    out = capsys.readouterr().out.splitlines()
    assert "rl step 2/2 | reward 0.500 | 0 s left" in out
    assert out[-1] == "the report"


def test_what_a_run_writes_is_private(tmp_path):
    before = os.umask(0o022)
    try:
        assert launch(tmp_path, "write_environment", 2) == 0
        assert os.umask(0o022) == 0o022, "the launcher keeps its own"
    finally:
        os.umask(before)
    open_to_others = [path for path in (tmp_path / "run").rglob("*") if path.lstat().st_mode & 0o077]
    assert [path for path in open_to_others if not path.is_symlink()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root: this test DID NOT RUN")
def test_ranks_have_a_private_folder_in_a_shared_tmpdir(tmp_path, monkeypatch):
    """Another user makes the folder that torch's compiler would read first; a resumed run finds its own again."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shared-") as shared:
        os.chmod(shared, 0o1777)
        subprocess.run(["mkdir", "-m", "777", f"{shared}/torchinductor_root"], user=65534, check=True)
        monkeypatch.setenv("TMPDIR", shared)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        for number, resume in enumerate((False, True), 1):
            assert launch(tmp_path, "write_folders", 2, resume=resume) == 0
            found = [json.loads((tmp_path / "run" / f"folders-{rank}.json").read_text()) for rank in (0, 1)]
            assert found[0] == found[1]
            tmpdir, owner, mode, given, cache = found[0]
            folder, name = os.path.split(tmpdir)
            assert os.path.dirname(folder) == shared
            assert name.startswith(f"{number}-")
            assert (owner, mode, given, cache) == (0, "0o40700", tmpdir, f"{folder}/inductor")
            assert os.listdir(folder) == ["inductor"], "the attempt's folder ends with it"
        assert sorted(os.listdir(shared)) == sorted([os.path.basename(folder), "torchinductor_root"])
        os.remove(f"{cache}/kept")
        assert launch(tmp_path, "write_environment", 1, resume=True) == 0
        assert os.listdir(shared) == ["torchinductor_root"], "an empty folder does not stay"


def test_a_crashed_run_has_a_page(tmp_path):
    assert launch(tmp_path, "killed_rank_one", 2) == 1
    texts, _ = page_data([RunFolder(tmp_path / "run")], tmp_path)
    assert RunFolder(tmp_path / "run").page.is_file()
    kinds = [texts["kinds"][kind] for kind, *_ in texts["runs"][0]["marks"]]
    assert kinds == ["attempt", "failure", "alert"]


def test_a_resumed_run_whose_metrics_are_cut_and_grow_at_once_continues(tmp_path, capsys):
    """The old size of metrics.jsonl is in the middle of a line of the new one."""
    run = RunFolder(tmp_path / "run").create()
    run.config.write_text(dump_config(make_config(tmp_path, 1)))
    lines = [json.dumps({"phase": "rl", "step": step, "total_steps": 6, "time": step}) + "\n" for step in range(1, 6)]
    run.metrics.write_text("".join(lines))
    assert launch(tmp_path, "resumed", 1, resume=True) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-2].startswith("rl step 6/6 | reward 0.123"), "before the path of the page"
    assert shown.err == ""


def test_a_run_of_which_nothing_can_be_shown_finishes(tmp_path):
    """A full disk under the launcher's output, metrics that are none, a report that cannot be read."""
    make_config(tmp_path, 1)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.launch.supervise.test_local import launch\n"
        "sys.exit(launch(Path(sys.argv[1]), 'odd_output', 1))"
    )
    with open("/dev/full", "w") as full:
        process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=full, stderr=full)
    (attempt,) = folders(RunFolder(tmp_path / "run"))
    assert read_verdict(attempt).cause == "finished"
    assert process.returncode == 0


def test_the_run_folder_is_private_and_holds_the_resolved_config(tmp_path):
    launch(tmp_path, "write_environment", 1)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved.data.template_time is not None
    given = make_config(tmp_path, 1)
    assert saved == given.model_copy(update={"data": saved.data})
    assert given.data == saved.data.model_copy(update={"template_time": None})


def test_a_user_error_of_one_rank_is_raised_while_the_others_hang(tmp_path):
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        launch(tmp_path, "user_error_on_rank_one", 3)
    assert str(caught.value) == "rollout.tp: 8 is too many; use 4"
    assert time.monotonic() - started < HANG_SECONDS


def test_a_run_that_is_not_finite_ends_in_one_line_with_a_cause_of_its_own(tmp_path, capsys):
    assert launch(tmp_path, "not_finite", 2) == 1
    assert capsys.readouterr().err == "rlhpc: rl step 3: not finite; the batches are in /r/nccl\n"
    verdict = read_verdict(folders(RunFolder(tmp_path / "run"))[-1])
    assert (verdict.cause, verdict.action) == ("non_finite", "stop")


def test_a_killed_rank_is_named_not_its_victims(tmp_path, capsys):
    assert launch(tmp_path, "killed_rank_one", 3) == 1
    message = capsys.readouterr().err
    assert "rlhpc: rank 1 on " in message
    assert "was killed" in message
    assert "\nrlhpc: its output: /" in message, "a killed process has no traceback"


@pytest.mark.long  # the parts: tests/launch/supervise/test_hang_watch.py, tests/parallel/test_timeouts.py
def test_a_rank_that_does_not_come_has_hung_and_is_named_not_the_one_that_waits(tmp_path):
    file = tmp_path / "given.yaml"
    make_config(tmp_path, 2)
    config = load_config(file, ["recovery.hang_timeout_seconds=4"])
    run = RunFolder(tmp_path / "run")
    assert run_local(config, run, resume=False, entry=f"{PROGRAMS}:late_for_a_collective") == 1
    verdict = read_verdict(folders(run)[-1])
    assert (verdict.cause, verdict.rank) == ("hang", 1)
    assert "is in rollout (late_for_a_collective: " in verdict.message
    assert "while 1 rank waits for it in all_reduce #" in verdict.message


FAILING = ("recovery.wait_seconds=0", "recovery.hang_timeout_seconds=4", "train.tokens_per_microbatch=16000")


def outcomes(folder: Path, name: str, *more: str) -> tuple[int, list[tuple[str, str, int]], list[tuple[str, ...]]]:
    """Exit code of a run whose rank 1 fails once, and of each attempt the verdict and the changed keys."""
    make_config(folder, 2)
    config = load_config(folder / "given.yaml", [*FAILING, f"name={name}", *more])
    run = RunFolder(folder / "run")
    code = run_local(config, run, entry=f"{PROGRAMS}:fails_once")
    verdicts = [verdict for each in folders(run) if (verdict := read_verdict(each))]
    known = [attempt.overrides for each in folders(run) if (attempt := read_attempt(each))]
    return code, [(verdict.cause, verdict.action, verdict.rank) for verdict in verdicts], known


@pytest.mark.parametrize(
    ("failure", "cause", "changed"),
    [
        ("killed", "crash", ()),
        ("memory", "gpu_memory", ("train.tokens_per_microbatch=8000",)),
        ("hang", "hang", ()),
    ],
)
def test_a_run_goes_on_after_a_failure(tmp_path, capsys, failure: str, cause: str, changed: tuple[str, ...]):
    code, verdicts, known = outcomes(tmp_path, failure)
    assert (code, known) == (0, [(), changed])
    assert [verdict[:2] for verdict in verdicts] == [(cause, "retry"), ("finished", "none")]
    assert failure == "hang" or verdicts[0][2] == 1
    ended, next_one, begun = capsys.readouterr().err.splitlines()
    assert re.match(rf"rlhpc: attempt 1 ended, {cause}.*: .* -> retry", ended)
    assert next_one == "rlhpc: next attempt in 0 s"
    assert begun.startswith("rlhpc: attempt 2: 2 ranks on ")


@pytest.mark.parametrize(("failure", "cause"), [("killed", "crash"), ("memory", "gpu_memory"), ("hang", "hang")])
def test_a_failure_before_the_first_step_ends_the_run(tmp_path, failure: str, cause: str):
    code, verdicts, _ = outcomes(tmp_path, f"{failure}-before", "recovery.start_seconds=4", "recovery.wait_seconds=600")
    assert code == 1
    assert [verdict[:2] for verdict in verdicts] == [(cause, "stop")]


def test_a_failed_node_is_the_only_one(tmp_path):
    with pytest.raises(UserError, match="this machine is the run's only node; continue with --resume"):
        outcomes(tmp_path, "node")
    verdict = read_verdict(folders(RunFolder(tmp_path / "run"))[-1])
    assert (verdict.cause, verdict.action, verdict.excluded) == ("bad_node", "stop", ())


def test_a_crash_of_the_interpreter_is_named(tmp_path, capsys):
    assert launch(tmp_path, "crash_on_rank_one", 2) == 1
    message = capsys.readouterr().err
    assert re.search(r"crashed: Segmentation fault in string_at \(.*/ctypes/__init__\.py, line \d+\)\n", message)


def test_the_rank_that_failed_of_itself_is_named_though_others_wrote_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "_CAUSE_SECONDS", 100.0)
    assert launch(tmp_path, "error_then_lost_peers", 3) == 1
    message = capsys.readouterr().err.splitlines()
    assert message[0].endswith("failed: KeyError: 'the real cause'")
    assert message[0].startswith("rlhpc: rank 2 on ")
    log = Path(message[1].removeprefix("rlhpc: its output and traceback: "))
    assert log.read_text().count("KeyError: 'the real cause'") == 1


def test_the_named_log_has_the_traceback_of_a_rank_that_ends_slowly(tmp_path, capsys):
    """Once, though the rank is killed before it has ended by itself."""
    assert launch(tmp_path, "error_while_the_heartbeat_is_busy", 2) == 1
    message = capsys.readouterr().err.splitlines()
    assert message[0].startswith("rlhpc: rank 1 on ")
    log = Path(message[1].removeprefix("rlhpc: its output and traceback: "))
    assert log.name == "rank-00001.log"
    assert log.read_text().count("Traceback (most recent call last)") == 1
    assert log.read_text().count("KeyError: 'the real cause'") == 1


def test_a_rank_that_is_done_does_not_wait_for_the_interpreter_to_tidy_up(tmp_path, monkeypatch):
    """It ends by itself, before the launcher would kill it."""
    ended, end = [], ChildRanks.end
    monkeypatch.setattr(local, "_TEARDOWN_SECONDS", 60.0)
    monkeypatch.setattr(ChildRanks, "end", lambda ranks: (ended.append(ranks.children[0].poll()), end(ranks)))
    assert launch(tmp_path, "slow_to_tidy_up", 1) == 0
    assert ended == [0]
    assert (tmp_path / "run" / "tidied").exists(), "handlers that programs register are still called"


def test_a_program_that_cannot_be_imported_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="has no 'nonsense'"):
        launch(tmp_path, "nonsense", 2)


def test_a_folder_with_a_run_wants_resume(tmp_path):
    assert launch(tmp_path, "write_environment", 1) == 0
    with pytest.raises(UserError, match="already contains a run; resume it with --resume"):
        launch(tmp_path, "write_environment", 1)
    shutil.rmtree(tmp_path / "run" / "report")
    assert launch(tmp_path, "write_environment", 1, resume=True) == 0


def test_resume_wants_a_run(tmp_path):
    with pytest.raises(UserError, match="contains no run; start it without --resume"):
        launch(tmp_path, "write_environment", 1, resume=True)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "samples.jsonl", "metrics.json", "report/report.txt"])
@pytest.mark.parametrize("resume", [False, True], ids=["", "resume"])
def test_a_file_that_no_run_wrote_is_not_overwritten(tmp_path, name, resume):
    """The configuration that the run is started with, say, in the folder of --run-dir."""
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("")
    with pytest.raises(UserError, match="was not written by a run, which would overwrite it; choose another folder"):
        launch(tmp_path, "write_environment", 1, resume)
    with pytest.raises(UserError, match="was not written by a run"):
        check_free(RunFolder(tmp_path / "run"), again=resume)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [file]


def test_a_second_launcher_is_kept_out(tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another rlhpc is running in"):
            launch(tmp_path, "write_environment", 1)


def test_more_than_one_node_is_refused(tmp_path):
    config = make_config(tmp_path, 1)
    two = config.model_copy(update={"slurm": config.slurm.model_copy(update={"nodes": 2})})
    with pytest.raises(UserError, match=r"slurm\.nodes: .*; set it to 1"):
        run_local(two, RunFolder(tmp_path / "run"))


@pytest.fixture(params=["hang"])
def hanging(tmp_path, request):
    """A launcher in its own session with two ranks that wait, and all their processes."""
    make_config(tmp_path, 2)
    code = (
        "import sys; from pathlib import Path; from rlhpc.config.load import load_config\n"
        "from rlhpc.core.folder import RunFolder; from rlhpc.launch.supervise.local import run_local\n"
        "folder = Path(sys.argv[1]); config = load_config(folder / 'given.yaml')\n"
        "sys.exit(run_local(config, RunFolder(folder / 'run'), entry=sys.argv[2]))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), f"{PROGRAMS}:{request.param}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    files = [tmp_path / "run" / f"pids-{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files), "the ranks to start")
    processes = [ProcessId.of(int(pid)) for file in files for pid in file.read_text().split()]
    assert all(processes)
    yield launcher, [process for process in processes if process]
    for process in processes:
        if process:
            process.kill_group()
    launcher.kill()
    launcher.wait()


def test_ranks_and_their_children_die_with_a_killed_launcher(hanging):
    launcher, processes = hanging
    launcher.kill()
    until(lambda: not any(process.is_alive() for process in processes), "the ranks to end with the launcher")


def test_interrupting_the_terminal_twice_ends_all_ranks_without_a_traceback(hanging):
    launcher, processes = hanging
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.stderr.readline() == "rlhpc: finishing the step and saving; press Ctrl-C again to end at once\n"
    time.sleep(0.5)
    assert launcher.poll() is None, "the ranks have the time to save"
    os.killpg(launcher.pid, signal.SIGINT)
    _, message = launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    (line,) = message.splitlines()
    assert line.startswith("rlhpc: ended; resume with --resume: ")
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("hanging", ["stop_when_asked"], indirect=True)
def test_interrupting_the_terminal_once_lets_the_ranks_save(hanging, tmp_path):
    launcher, processes = hanging
    os.killpg(launcher.pid, signal.SIGINT)
    _, message = launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    assert message.splitlines()[1].startswith("rlhpc: saved and ended; resume with --resume: ")
    assert [(tmp_path / "run" / f"saved-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert {end.kind for end in read_exits(RunFolder(tmp_path / "run").attempt(1).exits).values()} == {"stopped"}
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("hanging", ["killed_when_asked"], indirect=True)
def test_a_run_that_is_to_end_is_not_started_again(hanging, tmp_path):
    launcher, _ = hanging
    os.killpg(launcher.pid, signal.SIGINT)
    _, message = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "was killed by SIGKILL" in message
    assert len(folders(RunFolder(tmp_path / "run"))) == 1


def test_interrupting_a_pause_ends_the_run_at_once(tmp_path):
    make_config(tmp_path, 2)
    code = (
        "import sys; from pathlib import Path; from tests.launch.supervise.test_local import outcomes\n"
        "sys.exit(outcomes(Path(sys.argv[1]), 'killed', 'recovery.wait_seconds=600')[0])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    lines = [launcher.stderr.readline() for _ in range(2)]
    assert lines[1] == "rlhpc: next attempt in 600 s\n"
    time.sleep(0.5)
    os.killpg(launcher.pid, signal.SIGINT)
    _, message = launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    assert message.startswith("rlhpc: ended; resume with --resume: ")
    verdict = read_verdict(folders(RunFolder(tmp_path / "run"))[-1])
    assert (verdict.cause, verdict.action) == ("stopped", "stop")
    assert verdict.message == "ended by Ctrl-C in the pause after: was killed by SIGKILL"


def test_a_rank_killed_from_outside_ends_the_run_though_the_others_hang(hanging):
    launcher, processes = hanging
    os.kill(processes[2].pid, signal.SIGKILL)
    _, message = launcher.communicate(timeout=HANG_SECONDS / 2)
    assert launcher.returncode == 1
    assert message.startswith("rlhpc: rank 1 on ")
    assert not any(process.is_alive() for process in processes)
