"""Programs in responses, judged by tests."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from rlhpc.api import Completion, Prompt
from rlhpc.core.errors import UserError
from rlhpc.rewards import code
from rlhpc.rewards.code import Streams, last_block, python, read_tests
from rlhpc.rewards.reward_workers import start_reward_workers
from tests.rewards.scoring import sections

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ASSERTS = ["assert inc(1) == 2", "assert inc(2) == 3"]


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def score(program: str, truth: Any, **arguments: Any) -> float:
    return python("", block(program), truth, {}, seconds=20.0, **arguments)["score"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```Python3\na = '```'\n```", "a = '```'\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```text\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```\na\n```python\nb\n```", "b\n"),
        ("```python title\na\n```, which", "a\n"),
        ("````python\na\n````", "a\n"),
        ("```python\r\na\r\n```\r", "a\r\n"),
        ("an ```inline``` one", None),
        ("```python\na", None),
        ("a", None),
    ],
)
def test_the_last_python_block_counts(text: str, found: str | None):
    assert last_block(text) == found


def test_tests_are_read_in_all_their_forms():
    streams = [Streams("1 2\n", "3\n"), Streams("3 4\n", "7\n")]
    assert read_tests(SUMS) == read_tests(json.dumps(SUMS)) == streams
    assert read_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}) == [Streams("1\n2", "3")]
    assert read_tests(ASSERTS) == read_tests(json.dumps(ASSERTS)) == ASSERTS
    assert read_tests("assert f()") == ["assert f()"]


NO_TESTS = [
    "",
    [],
    {},
    None,
    3,
    {"inputs": ["1"], "outputs": []},
    {"inputs": [], "outputs": []},
    {"inputs": "1\n", "outputs": "2\n"},
    {**SUMS, "fn_name": "f"},
    [1],
]


@pytest.mark.parametrize("truth", NO_TESTS, ids=repr)
def test_other_ground_truths_are_errors(truth: Any):
    with pytest.raises(ValueError, match="has no tests in a known form"):
        read_tests(truth)


@pytest.mark.heavy
def test_what_a_program_prints_is_compared_line_by_line():
    assert score("a, b = map(int, input().split())\nprint(a + b, '  ')\nprint()", SUMS) == 1
    assert score("print(3)", SUMS) == 0
    assert score("print(3)", SUMS, partial=True) == 0.5
    assert score("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", SUMS) == 0
    assert score("print(", SUMS) == 0


@pytest.mark.heavy
def test_the_bounds_on_a_program_are_those_that_were_given():
    program = "x = bytearray(100 << 20)\nprint(sum(map(int, input().split())))"
    assert score(program, SUMS) == 1
    assert score(program, SUMS, memory_mib=64) == 0
    assert score(program, SUMS, total_seconds=0.0, partial=True) == 0
    fork = "import os\nif os.fork():\n    os.wait()\n    print(sum(map(int, input().split())))"
    assert (score(fork, SUMS), score(fork, SUMS, processes=1)) == (1, 0)
    assert score(f"import numpy\n{program}", SUMS) == 0, "packages are seen without being asked for"


@pytest.mark.heavy
def test_statements_must_raise_nothing():
    assert score("def inc(x):\n    return x + 1", ASSERTS) == 1
    assert score("def inc(x):\n    return x + 1", "\n".join(ASSERTS)) == 1
    assert score("def inc(x):\n    return 2", ASSERTS) == 0
    assert score("def inc(x):\n    return 2", ASSERTS, partial=True) == 0.5
    assert python("", "inc = lambda x: x + 1", ASSERTS, {}) == {"score": 0.0, "passed": 0.0}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "program",
    ["import os\nos._exit(0)", "raise SystemExit(0)", "def inc(x):\n    raise SystemExit(0)", "print('passed 2')"],
)
def test_ending_before_the_tests_passes_none(program: str):
    assert score(program, ASSERTS, partial=True) == 0


@pytest.mark.parametrize(("claim", "share"), [("9" * 5000, 0), ("1000000", 1)])
def test_in_process_a_forged_result_neither_raises_nor_passes_more_than_all_tests(claim: str, share: float):
    """A solution that looks into its own interpreter can print what the driver would."""
    program = f"import os, __main__\nos.write(__main__.answer, b'{claim}')\nos._exit(0)"
    assert score(program, ASSERTS, partial=True, in_process=True) == share


def test_in_process_statements_see_all_of_the_solution():
    program = "class P:\n    def __init__(self, x):\n        self.x = x\n"
    program += "    def __eq__(self, other):\n        return self.x == other.x\n"
    tests = ["assert P(1) == P(1)", "assert P(1) != P(2)"]
    assert score(program, tests, in_process=True) == 1
    assert score(program, tests) == 0, "objects of the solution are compared by its own code"
    assert score("def inc(x):\n    return 2", ASSERTS, partial=True, in_process=True) == 0.5


def test_a_solution_may_use_what_modules_have():
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
    )
    assert score(f"{program}print('printed')\ndef inc(x):\n    return P(x).x + 1", ASSERTS) == 1


def test_bad_arguments_are_refused_at_the_start():
    for arguments, message in (({"isolation": "none"}, "isolation 'none' is neither"), ({"memory": 1}, "unexpected")):
        given = sections(function="rlhpc.rewards.code:python", arguments=arguments)
        with pytest.raises(UserError, match=message):
            start_reward_workers(*given, lambda tokens: "", 20)


HARMFUL = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "processes that stay": "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(1000)",
    "memory": "x = bytearray(10 << 30)",
    "memory bit by bit": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "endless": "while True:\n    pass",
    "files": "import os\nfor n in range(1000):\n    open(f'{n}', 'wb').write(bytes(8 << 20))",
    "output": "while True:\n    print('x' * 100000)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "signals": "import os, signal\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)",
}


@pytest.mark.workers
def test_harmful_programs_are_worth_nothing_and_scoring_continues():
    good = "a, b = map(int, input().split())\nprint(a + b)"
    texts = [block(program) for program in (*HARMFUL.values(), good)]
    given = sections(function="rlhpc.rewards.code:python", arguments={"seconds": 1.0})
    reward_workers = start_reward_workers(*given, lambda tokens: texts[tokens[0]], 20)
    try:
        for key in range(len(texts)):
            completion = Completion(np.array([key], dtype=np.int32), np.zeros(1, dtype=np.float32), truncated=False)
            reward_workers.submit(key, Prompt(key, (1,), "code", SUMS, {}), completion)
        rewards = {key: result.reward for key, result in reward_workers.results().items()}
    finally:
        reward_workers.close()
    assert rewards == {**dict.fromkeys(range(len(HARMFUL)), 0.0), len(HARMFUL): 1.0}


def test_lines_are_those_of_python():
    ends = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
    generator = random.Random(0)
    for _ in range(2000):
        text = "".join(generator.choices(["a", " ", "\t", "\ufeff", "\u3000", *ends], k=generator.randrange(12)))
        assert list(code.lines_of(text)) == [line.rstrip() for line in text.rstrip().splitlines()], repr(text)
