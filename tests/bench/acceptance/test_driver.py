"""The driver on real processes, with fake parts: results, failures, limits, state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.acceptance.driver import INTERRUPTED, LOG, Options, accept
from bench.acceptance.results import STATE, Part, Results, read_results
from rlhpc.core import env
from rlhpc.core.errors import UserError
from rlhpc.core.process import ProcessId
from tests.bench.acceptance.fake_parts import part
from tests.helpers.waiting import until

pytestmark = pytest.mark.workers
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, from which parts can import this package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def start(parts: Sequence[Part], *names: str, **options: object) -> tuple[int, Results]:
    """One invocation; its exit code and the resulting state."""
    code = accept(Path("out"), parts, Options(names=names, **options))  # type: ignore[arg-type]
    return code, read_results(Path("out", STATE))


def page() -> str:
    (file,) = Path("out").glob("*.md")
    return file.read_text()


def statuses(results: Results) -> dict[str, str]:
    return {name: record.status for name, record in results.parts.items()}


def ended(pid: int) -> bool:
    return ProcessId.of(pid) is None


def test_results_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state and its page are shared. In the log, what Python prints has none."""
    monkeypatch.setenv("SITE_PASSWORD", "Plant3d password")
    code, results = start([part("leak")])
    assert code == 1
    assert results.parts["leak"].message == "RuntimeError: 401 for ***"
    assert {"printed ***", "written ***"} <= set(results.parts["leak"].tail)
    assert "Plant3d" not in page() + Path("out", STATE).read_text()
    assert "printed ***" in Path("out", LOG).read_text()


def test_a_failure_ends_its_part_alone() -> None:
    """A crash, an error, a user error and a part without results; parts before and after them pass."""
    names = ("good", "crash", "error", "user_error", "nothing", "slow_sync", "not_finite", "cases")
    parts = [*(part(name) for name in names), part("on_gpu", "good", needs_gpu=True)]
    code, results = start(parts)
    assert code == 1
    assert statuses(results) == {
        **dict.fromkeys(names, "passed"),
        **dict.fromkeys(("crash", "error", "user_error", "nothing"), "failed"),
        "on_gpu": "skipped",
    }
    found = results.parts
    assert [figure.name for figure in found["crash"].figures] == ["before"], "measured before the crash"
    assert found["crash"].message == "killed by SIGSEGV"
    assert any("about to crash" in line for line in found["crash"].tail)
    assert found["error"].message == "RuntimeError: no such | kernel"
    assert found["user_error"].message == "rollout.tp: 7 is not allowed; use 1"
    assert found["nothing"].message == "reported nothing"
    assert [figure.met for figure in found["slow_sync"].figures] == [False, True]
    assert [(figure.value, figure.met) for figure in found["not_finite"].figures] == [("nan", False)]

    text = page()
    problems, not_run = text.partition("## Not run")[0], text.partition("## Not run")[2].partition("## Machine")[0]
    for line in (
        "**crash: failed.** killed by SIGSEGV",
        "    about to crash",
        "**error: failed.** RuntimeError: no such \\| kernel",
        "**slow_sync: goal missed.** 8b: seconds: 0.31 (goal < 0.05).",
        "**not_finite: goal missed.** loss: nan (goal < 10).",
    ):
        assert line in problems
    assert "good" not in problems
    assert "| cases | several GPUs | needs 2 GPUs |" in not_run
    assert "| on_gpu | all | needs a GPU |" in not_run
    assert "| speed | 12.5 | GB/s | > 10 | yes | a\\|b |" in text
    assert "| right | yes |  | yes | yes |  |" in text
    files = sorted(path.name for path in Path("out").iterdir())
    assert files == [STATE, LOG, results.page]
    assert "about to crash" in Path("out", LOG).read_text()


def test_exit_codes() -> None:
    assert start([part("good")])[0] == 0
    assert start([part("slow_sync")])[0] == 0
    assert start([part("slow_sync")], strict=True)[0] == 1, "a start that runs nothing sees the missed goal too"
    assert start([part("crash")])[0] == 1
    assert start([part("good"), part("crash")], "good")[0] == 0, "only what is selected counts"


def test_a_part_beyond_its_limit_is_ended_with_all_its_processes() -> None:
    code, results = start([part("hang", minutes=0.1), part("good")])
    assert code == 1
    assert statuses(results) == {"hang": "timeout", "good": "passed"}
    hang = results.parts["hang"]
    assert hang.message == "exceeded its limit of 0.1 min"
    assert [figure.name for figure in hang.figures] == ["before"]
    assert any("in hang" in line for line in hang.tail), "stacks of where it hangs"
    assert ended(int(Path("hanging").read_text()))
    assert "**hang: timeout.** exceeded its limit of 0.1 min" in page()


def test_a_crash_leaves_no_process_behind() -> None:
    start([part("orphan")])
    assert ended(int(Path("hanging").read_text()))


def test_a_later_start_continues() -> None:
    """Passed parts do not run again, failed ones only with retry, named ones always."""
    parts = [part("good"), part("crash"), part("cases")]
    start(parts, "good")
    _, results = start(parts)
    first = {name: record.started for name, record in results.parts.items()}
    _, results = start(parts)
    assert {name: record.started for name, record in results.parts.items()} == first

    _, results = start(parts, retry=True)
    again = {name for name, record in results.parts.items() if record.started > first[name]}
    assert again == {"crash"}
    _, results = start(parts, "good")
    assert results.parts["good"].started > first["good"]


def test_a_part_starts_only_if_its_limit_fits() -> None:
    parts = [part("good"), part("long", "good", minutes=7.0), part("cases")]
    code, results = start(parts, minutes=5.0)
    assert code == 0
    assert statuses(results) == {"good": "passed", "cases": "passed"}
    assert "| long | all | not started yet |" in page()


def driver(*names: str) -> subprocess.Popen[bytes]:
    """An invocation in a separate process."""
    code = f"""
import sys
from pathlib import Path
from bench.acceptance.driver import Options, accept
from tests.bench.acceptance.fake_parts import part
sys.exit(accept(Path("out"), [part(name) for name in {names!r}], Options()))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def begun() -> bool:
    """Whether the part has reported and the driver has stored that."""
    file = Path("out", STATE)
    return file.exists() and "begun" in file.read_text()


def test_a_killed_driver_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """After kill -9 during a part, its process ends and a later invocation resumes with it."""
    names = ("good", "until_released")
    process = driver(*names)
    until(begun, "the second part to report", seconds=120)
    process.kill()
    process.wait()
    state = json.loads(Path("out", STATE).read_text())
    assert {name: record["status"] for name, record in state["parts"].items()} == {
        "good": "passed",
        "until_released": "running",
    }
    (figure,) = state["parts"]["until_released"]["figures"]
    until(lambda: ended(int(figure["value"])), "the part's process to end", seconds=60)

    Path("released").touch()
    code, results = start([part(name) for name in names])
    assert code == 0
    assert statuses(results) == dict.fromkeys(names, "passed")
    assert results.parts["good"].started == state["parts"]["good"]["started"]
    assert [figure.name for figure in results.parts["until_released"].figures] == ["begun", "released"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupt_keeps_what_is_there(signum: signal.Signals) -> None:
    process = driver("good", "until_released", "cases")
    until(begun, "the second part to report", seconds=120)
    process.send_signal(signum)
    assert process.wait() == INTERRUPTED
    results = read_results(Path("out", STATE))
    assert statuses(results) == {"good": "passed", "until_released": "interrupted"}
    (figure,) = results.parts["until_released"].figures
    assert ended(int(figure.value))
    assert "**until_released: interrupted.**" in page()


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    process = driver("until_released")
    until(begun, "the part to report", seconds=120)
    with pytest.raises(UserError, match="another acceptance is running in this folder"):
        start([part("good")])
    Path("released").touch()
    assert process.wait() == 0


def test_much_output_is_bounded() -> None:
    """The log has the beginning and end of a part's output, the page its last lines."""
    _, results = start([part("loud")])
    log = Path("out", LOG).read_text()
    assert len(log) < 600_000
    assert "first line" in log
    assert "RuntimeError: enough" in log
    assert "bytes left out" in log
    assert 10 < len(results.parts["loud"].tail) <= 40


def test_a_part_is_no_rank_of_the_job_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {env.SLURM_PROCID: "3", env.SLURM_NTASKS: "8", env.SLURM_LOCALID: "3"}.items():
        monkeypatch.setenv(name, value)
    _, results = start([part("rank")])
    assert results.parts["rank"].figures[0].value == "0 of 1"


def test_a_machine_is_recorded_once() -> None:
    _, first = start([part("good")])
    _, results = start([part("good"), part("cases")])
    assert list(results.machines) == list(first.machines)
    (machine,) = results.machines.values()
    assert machine.cpu_cores == len(os.sched_getaffinity(0))
    assert machine.packages["rlhpc"]
    assert time.time() - results.parts["good"].started < 600
