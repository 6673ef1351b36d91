"""Programs in responses, run against tests in a sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.rewards.sandbox import Ended, Isolation, Limits, Sandbox

_FENCE = re.compile(r"[ \t]*+`{3,}+[ \t]*+([\w+#-]*+)([^`]*+)")  # possessive: linear
_LANGUAGES = ("", "python", "python3", "py")

# Runs the solution as a module and then each test in it. What it prints last shows that the tests were come to.
_DRIVER = """
import json, os, sys, types
given = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
def run():
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(given["solution"], "solution.py", "exec"), module.__dict__)
    passed = 0
    for test in given["tests"]:
        try:
            exec(compile(test, "test.py", "exec"), module.__dict__)
        except BaseException:
            continue
        passed += 1
    os.write(answer, f"{given['token']} {passed}".encode())
run()
"""


@dataclass(frozen=True)
class Streams:
    """A test by what a program reads and what it prints then."""

    stdin: str
    stdout: str


Tests = list[Streams] | list[str]  # or statements that raise nothing


def python(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    partial: bool = False,
    seconds: float = 5.0,
    total_seconds: float = 20.0,
    memory_mib: int = 512,
    processes: int = 8,
    packages: bool = False,
    paths: Sequence[str] = (),
    isolation: Isolation = "namespaces",
) -> dict[str, float]:
    """1 if the last fenced Python block of the response passes all tests; with ``partial`` the share that it passes.

    ``ground_truth`` is ``{"inputs": [...], "outputs": [...]}``, or statements such as asserts (a text, or a list of
    them), or either as JSON. Without a block, 0. A program may take ``seconds`` of processor time for each input, or
    for all statements; after ``total_seconds`` by the clock what is left counts as failed. ``packages``: a program may
    import what is installed beside rlhpc, not the standard library alone. ``isolation``: see
    ``rlhpc.rewards.sandbox``.
    """
    tests = read_tests(ground_truth)
    program = last_block(solution_str)
    passed = 0.0
    if program is not None:
        sandbox = make_sandbox(seconds, memory_mib, processes, packages, tuple(paths), isolation)
        if isinstance(tests[0], Streams):
            passed = _run_streams(sandbox, program, tests, partial, total_seconds) / len(tests)
        else:
            passed = _run_statements(sandbox, program, tests, total_seconds) / len(tests)
    return {"score": passed if partial else float(passed == 1), "passed": passed}


@functools.lru_cache(maxsize=8)
def make_sandbox(
    seconds: float = 5.0,
    memory_mib: int = 512,
    processes: int = 8,
    packages: bool = False,
    paths: tuple[str, ...] = (),
    isolation: Isolation = "namespaces",
) -> Sandbox:
    """See ``python``."""
    if isolation not in ("namespaces", "filter"):
        raise ValueError(f"isolation {isolation!r} is neither namespaces nor filter")
    return Sandbox(Limits(seconds=seconds, memory_mib=memory_mib, processes=processes), isolation, packages, paths)


def check(partial: bool = False, total_seconds: float = 20.0, paths: Sequence[str] = (), **sandbox: Any) -> None:
    """A UserError where the sandbox cannot be had; called before the run."""
    make_sandbox(paths=tuple(paths), **sandbox).check()


python.check = check  # type: ignore[attr-defined]


def last_block(text: str) -> str | None:
    """The last fenced block that is said to be Python or says nothing; None without one."""
    last, block, language = None, None, ""
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            if block is not None:
                block.append(line + "\n")
        elif block is None or (fence[1] and not fence[2].strip()):  # a lone word begins another block
            block, language = [], fence[1].lower()
        else:
            last = "".join(block) if language in _LANGUAGES else last
            block = None
    return last


def read_tests(ground_truth: Any) -> Tests:
    """See ``python``; a ValueError for anything else."""
    given = _from_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(given, str) and given.strip():
        return [given]
    if isinstance(given, Sequence) and given and all(isinstance(item, str) for item in given):
        return list(given)
    if isinstance(given, dict) and not given.get("fn_name"):
        inputs, outputs = (given.get(key) for key in ("inputs", "outputs"))
        if isinstance(inputs, list) and isinstance(outputs, list) and 0 < len(inputs) == len(outputs):
            return [Streams(_lines(one), _lines(other)) for one, other in zip(inputs, outputs, strict=True)]
    raise ValueError(f"the ground truth holds no tests of a known form: {given!r:.80}")


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict | list | str) else text


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _run_streams(sandbox: Sandbox, program: str, tests: Sequence[Streams], partial: bool, total: float) -> int:
    """How many tests it passes; without ``partial`` none after the first that it does not."""
    passed, end = 0, time.monotonic() + total
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            break
        good = _prints(sandbox.run(program, test.stdin, left), test.stdout)
        if not good and not partial:
            break
        passed += good
    return passed


def _prints(ended: Ended, wanted: str) -> bool:
    """White space at the ends of lines and of the whole aside."""
    printed, expected = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (ended.output, wanted))
    return ended.code == 0 and printed == expected


def _run_statements(sandbox: Sandbox, program: str, tests: Sequence[str], total: float) -> int:
    """All in one process: what one test changes, the next one finds so."""
    token = secrets.token_hex(16)
    ended = sandbox.run(_DRIVER, json.dumps({"solution": program, "tests": tests, "token": token}), total)
    found = re.fullmatch(rf"{token} (\d{{1,9}})", ended.output)  # a program can learn the token and print anything
    return min(int(found[1]), len(tests)) if found else 0
