"""Responses that make a reward function slow, large or dead: bounded, counted, and worth 0."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest

from rlhpc.api import RewardResult
from rlhpc.config.reward import RewardFunctionSection
from rlhpc.core.errors import UserError
from rlhpc.rewards.calls import Entry, Failure, Score, failure_of
from rlhpc.rewards.pool import Pool, PoolCall
from rlhpc.rewards.reward_workers import entries_of
from tests.rewards.scoring import HERE, failures_of, score_all, sections

TOWER = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}"  # sympy tries to compute it


@pytest.mark.workers
def test_a_tower_of_powers_counts_as_zero_and_the_run_continues(make):
    """With default settings, and so with the time limit of five seconds."""
    reward_workers = make()
    results = score_all(reward_workers, [TOWER, *[r"\boxed{42}", r"\boxed{41}"] * 10], truth="42")
    assert [result.reward for result in results.values()] == [0, *[1, 0] * 10]
    assert failures_of(results) == {"timeout": 1}
    text = TOWER.replace("dfrac", "frac")
    assert score_all(reward_workers, [text], truth=TOWER)[0] == RewardResult(
        1.0, answer=text.removeprefix(r"\boxed{")[:-1]
    )


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["error", "drop"])
def test_no_policy_lets_a_response_end_the_run_by_a_built_in_function(make, policy: str):
    reward_workers = make(
        function="rlhpc.rewards.formats:pattern",
        arguments={"regex": "(a+)+b"},  # exponential
        time_limit_seconds=0.3,
        on_failure=policy,
        on_timeout=policy,
    )
    results = score_all(reward_workers, ["aab", "a" * 60, "ab"])
    assert [(result.reward, result.dropped) for result in results.values()] == [(1, False), (0, False), (1, False)]
    assert failures_of(results) == {"timeout": 1}


@pytest.mark.heavy
def test_a_flood_of_hanging_calls_costs_each_its_limit_and_loses_no_other(make):
    reward_workers = make(function=f"{HERE}:does", time_limit_seconds=0.8, per_engine=4)
    began = time.monotonic()
    results = score_all(reward_workers, ["hang", "ab", "abc"] * 12)
    assert [result.reward for result in results.values()] == [0, 2, 3] * 12
    assert failures_of(results) == {"timeout": 12}
    assert time.monotonic() - began < 60  # 12 calls on 4 workers, each 0.8 s and a start


def test_time_limits_are_the_functions_own_or_the_section_s_or_what_suits_them():
    paths = ("rules:maths", "formats:pattern", "code:python")
    functions = [{"name": path[:4], "function": f"rlhpc.rewards.{path}"} for path in paths]
    functions.append({"name": "mine", "function": "a:b"})

    def limits(**section: Any) -> list[float | None]:
        return [entry.time_limit_seconds for entry in entries_of(*sections(functions=functions, **section), 20)]

    assert limits() == [5, 5, 30, 30]
    assert limits(time_limit_seconds=7) == [7] * 4
    functions[0]["time_limit_seconds"] = 9
    assert limits(time_limit_seconds=7) == [9, 7, 7, 7]
    assert limits() == [9, 5, 30, 30]


@pytest.mark.heavy
def test_each_function_has_its_own_time_limit(make, caplog):
    functions = [
        RewardFunctionSection(name="short", function=f"{HERE}:does", time_limit_seconds=0.3).model_dump(),
        RewardFunctionSection(name="long", function=f"{HERE}:sleeps").model_dump(),
    ]
    reward_workers = make(functions=functions, per_engine=1)
    results = score_all(reward_workers, ["hang", "ab"], truth=0.6)
    assert [result.parts for result in results.values()] == [
        {"short": 0, "long": 1},
        {"short": 2, "long": 1},
    ]
    assert failures_of(results) == {"timeout": 1}
    assert "rewards.0.function tests.rewards.functions:does: took more than 0.3 s" in caplog.text


# ---- memory


@pytest.mark.parametrize("bomb", ["grow", "grow in small pieces"])
def test_a_call_that_exceeds_its_memory_limit_counts_as_zero(make, bomb: str):
    reward_workers = make(function=f"{HERE}:does", memory_limit_mib=64)
    results = score_all(reward_workers, [bomb, "ab", bomb, "abc"])
    assert [result.reward for result in results.values()] == [0, 2, 0, 3]
    assert failures_of(results) == {"memory": 2}


def test_the_memory_limit_ends_the_run_only_on_request(make):
    reward_workers = make(function=f"{HERE}:does", memory_limit_mib=128, on_failure="zero", on_timeout="error")
    with pytest.raises(UserError, match=r"does: ran out of memory \(limit: 128 MiB\) for prompt 11"):
        score_all(reward_workers, ["ab", "grow"])


@pytest.mark.heavy
def test_an_expression_of_gigabytes_is_a_wrong_answer(make):
    """math-verify takes running out of memory for a wrong answer. Without the limit this one uses all of its time."""
    reward_workers = make(memory_limit_mib=64, time_limit_seconds=60)
    results = score_all(reward_workers, [r"\boxed{(x+1)^{100000}}", r"\boxed{1+x^2}"], truth="x^2+1")
    assert [result.reward for result in results.values()] == [0, 1]
    assert failures_of(results) == {}


def test_functions_of_this_package_are_bounded_by_default_and_others_are_not():
    def limit(**section: Any) -> int | None:
        return entries_of(*sections(**section), 20)[0].memory_limit_mib

    assert limit() == limit(function="rlhpc.rewards.code:python") == 2048
    assert limit(function="a:b") is None
    assert limit(memory_limit_mib=5) == limit(function="a:b", memory_limit_mib=5) == 5


@pytest.mark.parametrize(("built_in", "made"), [(True, [1, 1, 1]), (False, [1, 2, 3])])
def test_each_call_has_all_of_its_memory_regardless_of_what_former_ones_keep(built_in: bool, made: list[int]):
    """Each keeps 60 MiB. What ``does`` returns is how many such calls its process has made: one that makes built-in
    functions' is replaced, but one that keeps a user's model stays."""
    pool = Pool([Entry(f"{HERE}:does", {}, "", memory_limit_mib=100, built_in=built_in)], 1, 30.0)
    words = {"data_source": "", "solution_str": "keep", "ground_truth": "", "extra_info": {}}
    keywords = {**words, "response_tokens": 0, "max_response_tokens": 0}
    try:
        pool.submit([PoolCall((key, 0), keywords) for key in range(3)])
        assert [outcome for _, outcome in sorted(pool.outcomes().items())] == [Score(float(count)) for count in made]
    finally:
        pool.close()


def test_a_program_s_memory_limit_is_not_its_worker_s(make):
    """The program may allocate more than the worker itself."""
    reward_workers = make(function="rlhpc.rewards.code:python", memory_limit_mib=64)
    program = "```python\nx = bytearray(200 << 20)\nprint(3)\n```"
    assert score_all(reward_workers, [program], truth={"inputs": [""], "outputs": ["3"]})[0].reward == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"), "memory"),
        (RuntimeError("other"), "raised"),
        (OSError(2, "No such file"), "raised"),
        (TimeoutError("of a server"), "raised"),
    ],
)
def test_what_counts_as_running_out_of_memory(error: Exception, kind: str):
    assert failure_of(error).kind == kind
    if kind == "memory":
        assert failure_of(error, 64) == Failure("memory", "ran out of memory (limit: 64 MiB)")


# ---- deaths


def test_a_sandbox_that_is_killed_from_outside_counts_as_a_death(make):
    """As the kernel kills where a node's memory is short."""
    reward_workers = make(function="rlhpc.rewards.code:python", per_engine=1)
    (worker,) = [child for child in psutil.Process().children() if "rewards.worker" in " ".join(child.cmdline())]

    def kill() -> None:
        while not (children := worker.children()):
            time.sleep(0.01)
        os.kill(children[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    program = "```python\nimport time\ntime.sleep(1000)\n```"
    results = score_all(reward_workers, [program], truth={"inputs": [""], "outputs": ["3"]})
    killer.join()
    assert results[0].reward == 0
    assert failures_of(results) == {"died": 1}
