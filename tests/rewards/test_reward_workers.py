"""Scoring in processes of its own: sums, failures and their policies, ends."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rlhpc.api import Completion, Prompt, RewardResult
from rlhpc.core.errors import UserError
from rlhpc.core.process import ProcessId
from rlhpc.rewards import pool
from rlhpc.rewards import reward_workers as reward_workers_module
from rlhpc.rewards.calls import UNFINISHED, Entry
from rlhpc.rewards.reward_workers import entries_of, start_reward_workers
from tests.helpers.waiting import until
from tests.rewards.scoring import HERE, LIMIT, Texts, failures_of, score_all, sections


def test_several_functions_are_summed_with_their_weights(make):
    functions = [
        {"name": "right", "function": "rlhpc.rewards.rules:number", "weight": 2.0},
        {"name": "size", "function": f"{HERE}:tokens", "weight": -0.25},
    ]
    results = score_all(make(functions=functions), ["it is 3", "it is 4"])
    assert results == {
        0: RewardResult(1.75, {"right": 1.0, "size": 1.0, "size/most": 20.0}, answer="3"),
        1: RewardResult(-0.25, {"right": 0.0, "size": 1.0, "size/most": 20.0}, answer="4"),
    }


def test_workers_receive_each_function_as_configured():
    named = [{"name": "long", "function": "rlhpc.rewards.formats:overlong", "arguments": {"penalty": 2}}]
    assert [*entries_of(*sections(function="a:b"), 20), *entries_of(*sections(functions=named), 9)] == [
        Entry("a:b", {}, "rewards.0.function", max_response_tokens=20, time_limit_seconds=30.0),
        Entry(
            named[0]["function"],
            {"penalty": 2},
            "rewards.0.function",
            max_response_tokens=9,
            time_limit_seconds=5.0,
            memory_limit_mib=2048,
            built_in=True,
        ),
    ]


def test_a_single_function_has_no_part_of_its_own(make):
    reward_workers = make(function=f"{HERE}:tokens")
    assert score_all(reward_workers, ["a"]) == {0: RewardResult(1.0, {"most": 20.0})}
    assert reward_workers.results() == {}


def test_a_function_sees_the_length_without_tokens_of_tools(make):
    reward_workers = make(function=f"{HERE}:tokens")
    tokens = np.zeros(5, np.int32)
    texts = reward_workers.decode.__self__
    texts.completion("a")
    response = Completion(tokens, tokens.astype(np.float32), truncated=False, tool_tokens=3)
    reward_workers.submit(0, Prompt(0, (1,), "", "3", {}), response)
    assert reward_workers.results() == {0: RewardResult(2.0, {"most": 20.0})}


def test_every_response_is_judged_once_by_what_belongs_to_it(make):
    reward_workers = make(function=f"{HERE}:plus", arguments={"more": 0.5})
    for count in (300, 7):
        results = score_all(reward_workers, ["x" * (key % 5) for key in range(count)])
        assert results == {key: RewardResult(0.5 + key % 5 + key) for key in range(count)}


def test_texts_longer_than_a_pipe_are_taken(make):
    reward_workers = make(function=f"{HERE}:does")
    assert {result.reward for result in score_all(reward_workers, ["x" * 1_000_000] * 40).values()} == {1e6}


# ---- failures

FAILURES = {
    "raise": ("raised", r"raised ZeroDivisionError: division by zero \(.*functions.py:\d+\)"),
    "nan": ("result", "returned nan"),
    "hang": ("timeout", "took more than 1.5 s"),
    "leave": ("died", "ended its process with exit code 3"),
    "crash": ("died", "ended its process by SIGSEGV"),
    "killed": ("died", "ended its process by SIGKILL, perhaps because memory ran out"),
    "killed by another": ("died", "ended its process by signal 37"),
}
MIXED = ["ab", "raise", "abc", "hang", "leave", "abcd", "nan", "crash", "killed", "killed by another", *["abcde"] * 60]
COUNTS = {"raised": 1, "result": 1, "timeout": 1, "died": 4}


@pytest.mark.workers
def test_failures_may_count_as_zero_and_others_are_not_touched(make, caplog):
    reward_workers = make(function=f"{HERE}:does", on_failure="zero", time_limit_seconds=LIMIT)
    with caplog.at_level(logging.WARNING):
        results = score_all(reward_workers, [*MIXED, "raise", "raise"])
    rewards = [results[key].reward for key in range(len(MIXED) + 2)]
    assert rewards == [0.0 if text in FAILURES else float(len(text)) for text in [*MIXED, "raise", "raise"]]
    assert not any(result.dropped for result in results.values())
    assert failures_of(results) == {**COUNTS, "raised": 3}
    assert results[1].failures == ("raised",)
    assert failures_of(score_all(reward_workers, ["ab"])) == {}
    assert len(caplog.messages) == 4  # one of each kind
    assert "raised ZeroDivisionError" in caplog.messages[0]
    assert "for prompt 11 of 'sums', response 'raise'; counted as 0" in caplog.messages[0]


def test_a_failed_function_among_several_counts_as_zero_alone(make):
    functions = [{"name": "a", "function": f"{HERE}:does"}, {"name": "b", "function": f"{HERE}:tokens"}]
    reward_workers = make(functions=functions, on_failure="zero")
    parts = {"a": 0.0, "b": 1.0, "b/most": 20.0}
    assert score_all(reward_workers, ["raise"])[0] == RewardResult(1.0, parts, failures=("raised",))


def test_failures_may_leave_the_response_out(make):
    functions = [{"name": "a", "function": f"{HERE}:does"}, {"name": "b", "function": f"{HERE}:tokens"}]
    responses = ["raise", "ab", "leave"]
    results = score_all(make(functions=functions, on_failure="drop", on_timeout="drop"), responses)
    assert [results[key].dropped for key in range(3)] == [True, False, True]
    assert [results[key].failures for key in range(3)] == [("raised",), (), ("died",)]
    assert results[1] == RewardResult(3.0, {"a": 2.0, "b": 1.0, "b/most": 20.0})
    results = score_all(make(functions=functions, on_failure="drop"), responses)
    assert [results[key].dropped for key in range(3)] == [True, False, False], "a death counts as 0"


def test_what_a_function_raises_or_returns_ends_the_run_by_default(make):
    reward_workers = make(function=f"{HERE}:does")
    for text in ("raise", "nan"):
        with pytest.raises(UserError, match=ends_with(text)) as caught:
            score_all(reward_workers, ["ab", text, "abc"])
        assert caught.value.remedy.endswith("set reward_workers.on_failure")
    with pytest.raises(UserError) as caught:
        score_all(make(function=f"{HERE}:selected"), ["y" * 200])
    assert "response '" + "y" * 80 + "';" in str(caught.value)


@pytest.mark.workers
def test_a_call_that_does_not_end_by_itself_ends_the_run_only_on_request(make):
    lost = [text for text, (kind, _) in FAILURES.items() if kind in UNFINISHED]
    reward_workers = make(function=f"{HERE}:does", time_limit_seconds=LIMIT)
    results = score_all(reward_workers, ["ab", *lost, "abc"])
    assert [result.reward for result in results.values()] == [2, *[0.0] * 5, 3]
    assert failures_of(results) == {"timeout": 1, "died": 4}
    reward_workers = make(function=f"{HERE}:does", time_limit_seconds=LIMIT, on_failure="zero", on_timeout="error")
    for text in lost:
        with pytest.raises(UserError, match=ends_with(text)) as caught:
            score_all(reward_workers, ["ab", text, "abc"])
        assert caught.value.remedy.endswith("set reward_workers.on_timeout")


def ends_with(text: str) -> str:
    """The line of a run that ends with the failure of the second response."""
    return rf"^rewards.0.function {HERE}:does: {FAILURES[text][1]} for prompt 11 of 'sums', response '{text}'; "


@pytest.mark.workers
def test_a_rank_that_waits_for_a_slow_reward_does_not_hang(make, monkeypatch):
    """It says so each second, and no longer than the reward may take: by a clock that counts these seconds."""
    touches: list[str] = []

    def clock() -> float:
        return float(len(touches)) if threading.current_thread() is threading.main_thread() else time.monotonic()

    monkeypatch.setattr(pool, "touch", touches.append)
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(pool, "_REPLACED_SECONDS", -LIMIT / 2)  # silent for the second half
    reward_workers = make(function=f"{HERE}:does", time_limit_seconds=2 * LIMIT)
    began = time.monotonic()
    score_all(reward_workers, ["hang"])
    assert time.monotonic() - began >= 2 * LIMIT
    assert touches == ["score"] * 3, "at 0, 1 and 2 seconds"


@pytest.mark.workers
def test_a_rank_that_polls_for_a_slow_reward_does_not_hang(make, monkeypatch):
    """As an engine on ranks of its own does: each look is progress while a call is within its limit, and no longer."""
    touches: list[str] = []
    monkeypatch.setattr(reward_workers_module, "touch", touches.append)
    reward_workers = make(function=f"{HERE}:does", time_limit_seconds=LIMIT)
    assert reward_workers.ready() == {}
    assert touches == [], "nothing is being scored"
    texts = reward_workers.decode.__self__
    reward_workers.submit(0, Prompt(10, (1,), "sums", "3", {"index": 0}), texts.completion("hang"))
    assert reward_workers.ready() == {}
    assert touches == ["score"]
    monkeypatch.setattr(pool, "_REPLACED_SECONDS", -LIMIT)
    assert reward_workers.ready() == {}
    assert touches == ["score"], "past the limit"


@pytest.mark.workers
def test_what_a_hanging_function_has_started_is_killed_too(make, tmp_path):
    file = tmp_path / "processes"
    reward_workers = make(function=f"{HERE}:hangs_with_child", on_timeout="drop", time_limit_seconds=LIMIT)
    assert score_all(reward_workers, [str(file)])[0].dropped
    assert [pid for pid in file.read_text().split() if runs(int(pid))] == []


# ---- beside the engine


def test_functions_are_called_beside_this_process_and_each_other(make, tmp_path):
    """Each of the two waits for the other, and both for what this process does after it has submitted."""
    functions = [{"name": n, "function": f"{HERE}:meets", "arguments": {"name": n}} for n in ("a", "b")]
    reward_workers = make(functions=functions, per_engine=2)
    text = reward_workers.decode.__self__.completion(str(tmp_path))
    reward_workers.submit(5, Prompt(1, (1,), "sums", ["a", "b", "here"], {}), text)
    (tmp_path / "here").touch()
    assert reward_workers.results() == {5: RewardResult(2.0, {"a": 1.0, "b": 1.0})}


def test_results_that_arrived_are_returned_without_waiting_for_others(make, tmp_path):
    """And a response's once all functions have scored it."""
    functions = [{"name": n, "function": f"{HERE}:meets", "arguments": {"name": n}} for n in ("a", "b")]
    reward_workers = make(functions=functions, per_engine=2)
    text = reward_workers.decode.__self__.completion(str(tmp_path))
    for key, truth in enumerate((["a"], ["a", "here"], ["b"])):
        reward_workers.submit(key, Prompt(1, (1,), "sums", truth, {}), text)
    found: dict[int, RewardResult] = {}
    result = RewardResult(2.0, {"a": 1.0, "b": 1.0})
    until(lambda: found.update(reward_workers.ready()) or 0 in found)
    assert found == {0: result}
    (tmp_path / "here").touch()
    assert reward_workers.results() == {1: result, 2: result}
    assert reward_workers.ready() == {}


def test_a_worker_has_neither_torch_nor_sockets_and_is_ended(make):
    """Nor gives it what it has open to programs that it starts: they would hold its pipes open beyond its end."""
    reward_workers = make(function=f"{HERE}:process")
    result = score_all(reward_workers, ["a"])[0]
    assert result.parts == {"torch": 0.0, "sockets": 0.0, "given": 0.0}
    assert int(result.reward) in [child.pid for child in psutil.Process().children()]
    reward_workers.close()
    assert not runs(int(result.reward))
    reward_workers.close()


def test_signals_that_ask_ranks_to_stop_leave_workers_alone(make, tmp_path):
    reward_workers = make(function=f"{HERE}:meets", arguments={"name": "a"})
    text = reward_workers.decode.__self__.completion(str(tmp_path))
    reward_workers.submit(0, Prompt(1, (1,), "sums", ["a", "here"], {}), text)
    until(lambda: (tmp_path / "a").exists())
    (worker,) = [child for child in psutil.Process().children() if "rewards.worker" in " ".join(child.cmdline())]
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        worker.send_signal(signum)
    (tmp_path / "here").touch()
    assert reward_workers.results() == {0: RewardResult(1.0)}


_MEETING = (
    "import sys, time\n"
    "from rlhpc.rewards.calls import Entry\n"
    "from rlhpc.rewards.pool import Pool, PoolCall\n"
    f"pool = Pool([Entry('{HERE}:meets', {{'name': 'a'}}, '')], 1, float(sys.argv[2]))\n"
    "words = dict(data_source='', solution_str=sys.argv[1], ground_truth=['b'], extra_info={})\n"
    "pool.submit([PoolCall((0, 0), {**words, 'response_tokens': 0, 'max_response_tokens': 0})])\n"
    "print(pool.outcomes())\n"
    "pool.close()\n"
)


def meeting(folder: Path, limit: float) -> tuple[psutil.Popen, psutil.Process]:
    """A process whose worker waits for the file b, and the worker."""
    process = psutil.Popen([sys.executable, "-c", _MEETING, str(folder), str(limit)], stdout=subprocess.PIPE, text=True)
    until(lambda: (folder / "a").exists())
    return process, process.children()[0]


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed as the kernel kills, during a call."""
    process, worker = meeting(tmp_path, 1000)
    process.kill()
    process.wait()
    until(lambda: not runs(worker.pid))


@pytest.mark.workers
def test_the_time_that_a_job_is_suspended_does_not_count(tmp_path):
    process, worker = meeting(tmp_path, 4.5)
    for each in (process, worker):
        each.suspend()
    time.sleep(5)
    for each in (process, worker):
        each.resume()
    time.sleep(0.4)
    (tmp_path / "b").touch()
    assert process.communicate(timeout=100)[0] == "{(0, 0): Score(value=1.0, parts={}, answer=None)}\n"


# ---- starting


_FLAKY = """
import os, pathlib, time
starts = pathlib.Path("starts")
with starts.open("a") as file:
    file.write("x")
if len(starts.read_text()) == 2:
    os._exit(9)
def score(data_source, solution_str, ground_truth, extra_info):
    return time.sleep(1000) if solution_str == "hang" else 1.0
"""


@pytest.mark.workers
def test_a_start_that_is_lost_late_in_a_run_is_made_again(make, tmp_path, monkeypatch):
    """As where memory is short for a moment: that the functions can be imported is known by then."""
    (tmp_path / "flaky.py").write_text(_FLAKY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    reward_workers = make(function="flaky:score", per_engine=1, time_limit_seconds=LIMIT)
    assert [result.reward for result in score_all(reward_workers, ["hang", "ab"]).values()] == [0.0, 1.0]
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_module_of_the_working_folder_is_found(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): return 7")
    assert score_all(make(function="own_reward:score"), ["a"])[0].reward == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1 / 0", r"rewards.0.function: 'broken' fails when imported \(.*broken.py:1: ZeroDivisionError: division"),
        ("import nowhere", "rewards.0.function: cannot import 'broken'"),
        ("import os; os._exit(5)", "rewards.0.function: importing broken:score ended its process with exit code 5"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_at_once(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"^{message}"):
        start_reward_workers(*sections(function="broken:score"), Texts().decode, 20)


def runs(pid: int) -> bool:
    return ProcessId.of(pid) is not None
