"""Tests by statements in an interpreter of their own, which the solution cannot reach.

    tests_side.py ── requests ──> solution_side.py
    (sandbox 1)  <── values ───   (sandbox 2)

Each runs in its own sandbox, joined by two pipes. The expected values stay in the first one, which makes the verdict.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlhpc.rewards import kernel
from rlhpc.rewards.sandbox import Sandbox, SandboxError, SandboxKilled

_KILLED, _FAILED = 3, 4  # exit codes of the process that runs the solution's sandbox
_LOAD = """
import marshal, sys
for name, code in {modules}:
    module = sys.modules[name] = type(sys)(name)
    exec(marshal.loads(code), module.__dict__)
module.main({arguments})
"""


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
