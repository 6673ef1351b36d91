"""Reward of programs in responses, run against tests in a sandbox.

Statements run in an interpreter of their own, which the solution cannot reach:

    tests_side.py ── requests ──> solution_side.py
    (sandbox 1)  <── values ───   (sandbox 2)

Each runs in its own sandbox, joined by two pipes. The expected values stay in the first one, which counts passed tests.
"""

from __future__ import annotations

import functools
import itertools
import json
import marshal
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhpc.rewards import kernel
from rlhpc.rewards.sandbox import Isolation, Limits, ProgramResult, Sandbox, SandboxError, SandboxKilled

_FENCE = re.compile(r"[ \t]*+`{3,}+[ \t]*+([\w+#-]*+)([^`]*+)")  # possessive: linear
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]")
_LANGUAGES = ("", "python", "python3", "py")

# Runs the solution as a module, then each test in it. The solution can change both, and the result.
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
    os.write(answer, str(passed).encode())
run()
"""

_KILLED, _FAILED = 3, 4  # exit codes of the process that runs the solution's sandbox
_LOAD = """
import marshal, sys
for name, code in {modules}:
    module = sys.modules[name] = type(sys)(name)
    exec(marshal.loads(code), module.__dict__)
module.main({arguments})
"""


@dataclass(frozen=True)
class Streams:
    """A test by a program's input and expected output."""

    stdin: str
    stdout: str


Tests = list[Streams] | list[str]  # or statements, each passed if it does not raise


@dataclass(frozen=True)
class ProgramOptions:
    """Arguments of ``python``."""

    partial: bool = False  # the score is the share of tests passed
    seconds: float = 5.0  # CPU time per input, or for all statements together
    total_seconds: float = 20.0  # wall-clock time per response; the remaining tests fail
    memory_mib: int = 512  # per process of the program
    processes: int = 8
    packages: bool = False  # the program may import installed packages, not only the standard library
    paths: tuple[str, ...] = ()  # further files and folders that it may read
    isolation: Isolation = "namespaces"  # see ``rlhpc.rewards.sandbox``
    in_process: bool = False  # statements run in the program's interpreter, where it can forge their result


def python(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **options: Any
) -> dict[str, float]:
    """1 if the last fenced Python block of the response passes all tests, else 0; ``options``: ``ProgramOptions``.

    ``ground_truth`` is ``{"inputs": [...], "outputs": [...]}``, or statements such as asserts (a text, or a list of
    them), or either as JSON.
    """
    tests = read_tests(ground_truth)
    program = last_block(solution_str)
    read, passed = _read_options(options), 0.0
    if program is not None:
        passed = _count_passed(read, program, tests) / len(tests)
    passed = min(1.0, max(0.0, passed))
    return {"score": passed if read.partial else float(passed == 1), "passed": passed}


def _read_options(options: Mapping[str, Any]) -> ProgramOptions:
    return ProgramOptions(**{**options, "paths": tuple(options.get("paths", ()))})


@functools.lru_cache(maxsize=8)
def _make_sandbox(options: ProgramOptions) -> Sandbox:
    if options.isolation not in ("namespaces", "filter"):
        raise ValueError(f"isolation {options.isolation!r} is neither namespaces nor filter")
    limits = Limits(seconds=options.seconds, memory_mib=options.memory_mib, processes=options.processes)
    return Sandbox(limits, options.isolation, packages=options.packages, paths=options.paths)


def check(**options: Any) -> None:
    """Raises a UserError if this machine does not allow the sandbox; called before the run."""
    _make_sandbox(_read_options(options)).check()


def _check_tests(data_source: str, ground_truth: Any, **options: Any) -> None:
    read_tests(ground_truth)


python.check = check  # type: ignore[attr-defined]
python.check_ground_truth = _check_tests  # type: ignore[attr-defined]
python.quick_check = _check_tests  # type: ignore[attr-defined]


def last_block(text: str) -> str | None:
    """The last fenced block marked as Python or unmarked; None without one."""
    last: str | None = None
    block: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            if block is not None:
                block.append(line + "\n")
        elif block is None or (fence[1] and not fence[2].strip()):  # a fence with a single word opens another block
            block, language = [], fence[1].lower()
        else:
            last = "".join(block) if language in _LANGUAGES else last
            block = None
    return last


def read_tests(ground_truth: Any) -> Tests:
    """Tests in any form that ``python`` takes; a ValueError for anything else."""
    given = _from_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(given, str) and given.strip():
        return [given]
    if isinstance(given, Sequence) and given and all(isinstance(item, str) for item in given):
        return list(given)
    if isinstance(given, dict) and not given.get("fn_name"):
        inputs, outputs = (given.get(key) for key in ("inputs", "outputs"))
        if isinstance(inputs, list) and isinstance(outputs, list) and 0 < len(inputs) == len(outputs):
            return [Streams(_lines(one), _lines(other)) for one, other in zip(inputs, outputs, strict=True)]
    raise ValueError(f"the ground truth has no tests in a known form: {given!r:.80}")


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict | list | str) else text


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _count_passed(options: ProgramOptions, program: str, tests: Tests) -> int:
    sandbox = _make_sandbox(options)
    streams = [test for test in tests if isinstance(test, Streams)]
    if streams:
        return _run_streams(sandbox, program, streams, options)
    statements = [test for test in tests if isinstance(test, str)]
    run = _run_in_process if options.in_process else passed_apart
    return min(run(sandbox, program, statements, options.total_seconds), len(tests))


def _run_streams(sandbox: Sandbox, program: str, tests: Sequence[Streams], options: ProgramOptions) -> int:
    """Number of tests passed; without ``partial`` it stops at the first failure."""
    passed, end = 0, time.monotonic() + options.total_seconds
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            break
        good = _prints(sandbox.run(program, test.stdin, left), test.stdout)
        if not good and not options.partial:
            break
        passed += good
    return passed


def _prints(result: ProgramResult, wanted: str) -> bool:
    """True if the program printed ``wanted``; ignores trailing white space of lines and of the whole."""
    pairs = itertools.zip_longest(lines_of(result.output), lines_of(wanted))
    return result.code == 0 and all(printed == expected for printed, expected in pairs)


def lines_of(text: str) -> Iterator[str]:
    """Lines of ``str.splitlines`` without trailing white space, one at a time: a list of them may be large."""
    text, start = text.rstrip(), 0
    for end in _LINE_END.finditer(text):
        yield text[start : end.start()].rstrip()
        start = end.end()
    if start < len(text):
        yield text[start:].rstrip()


def _run_in_process(sandbox: Sandbox, program: str, tests: Sequence[str], total: float) -> int:
    """Number of tests passed, as the program's own interpreter reports it; a program can report anything."""
    result = sandbox.run(_DRIVER, json.dumps({"solution": program, "tests": tests}), total)
    return int(result.output) if re.fullmatch("[0-9]{1,9}", result.output) else 0


def passed_apart(sandbox: Sandbox, solution: str, tests: Sequence[str], total: float) -> int:
    """Number of tests passed. They run one after the other and see each other's changes."""
    from_tests, to_solution = os.pipe()
    from_solution, to_tests = os.pipe()
    stop, held = os.pipe()
    own, other = (from_solution, to_solution), (from_tests, to_tests)
    worker = os.getpid()
    beside = os.fork()
    if not beside:
        os.close(held)
        _be_beside(sandbox, other, own, total, stop, worker)
    for descriptor in (*other, stop):
        os.close(descriptor)
    try:
        result = sandbox.run(_program("tests_side", f"{solution!r}, {list(tests)!r}"), within=total, link=own)
    finally:
        for descriptor in (*own, held):
            os.close(descriptor)
        ended = os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1])
    if ended in (_KILLED, _FAILED):
        raise (SandboxKilled if ended == _KILLED else SandboxError)("the sandbox of the solution failed")
    return int(result.errors) if result.code == 0 and re.fullmatch("[0-9]{1,9}", result.errors) else 0


def _be_beside(
    sandbox: Sandbox, link: tuple[int, int], other: tuple[int, int], total: float, stop: int, worker: int
) -> NoReturn:
    """Process that runs the solution's sandbox until the pipe ``stop`` or the worker ends. Not until a signal, whose
    handler would raise while the sandbox's folder is made or removed."""
    code = 0
    try:
        kernel.die_with_parent()
        if os.getppid() != worker:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for descriptor in other:
            os.close(descriptor)
        sandbox.run(_program("solution_side", ""), within=total, link=link, stop=stop)
    except SandboxKilled:
        code = _KILLED
    except BaseException as error:
        code = _FAILED
        os.write(2, f"sandbox of a solution: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _program(side: str, arguments: str) -> str:
    return _LOAD.format(modules=_modules(side), arguments=arguments)


@functools.lru_cache
def _modules(side: str) -> str:
    """Names and compiled code of the modules of one side."""
    names = ("wire", side)
    codes = [compile(Path(__file__).with_name(f"{name}.py").read_bytes(), f"{name}.py", "exec") for name in names]
    return repr([(f"rlhpc.rewards.{name}", marshal.dumps(code)) for name, code in zip(names, codes, strict=True)])
