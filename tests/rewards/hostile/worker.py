"""Process that runs sandboxes as a user or as root: reads tasks from standard input, writes results, a line each.

It imports what it needs as root and then becomes the user, who may not be able to read this project.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna
import encodings.unicode_escape  # noqa: F401
import functools
import json
import os
import resource
import sys
import traceback
from typing import Any

from rlhpc.rewards import code, folder
from rlhpc.rewards.sandbox import Limits, Sandbox, SandboxError, SandboxKilled

_PR_SET_DUMPABLE = 4
_SHOWN = 20000  # characters of an output


@functools.lru_cache(maxsize=64)
def _sandbox(limits: tuple[tuple[str, Any], ...], isolation: Any, paths: tuple[str, ...]) -> Sandbox:
    return Sandbox(Limits(**dict(limits)), isolation, paths=list(paths))


def _run(task: dict[str, Any]) -> dict[str, Any]:
    if "tests" in task:
        options = {"isolation": task["isolation"], "seconds": 10.0, "total_seconds": 6.0, "partial": True}
        return code.python("", f"```python\n{task['text']}\n```", task["tests"], {}, **options)
    sandbox = _sandbox(tuple(task["limits"].items()), task["isolation"], tuple(task["paths"]))
    ended = sandbox.run(task["text"], "1 2\n", task["within"])
    return {
        "code": ended.code,
        "output": ended.output[:_SHOWN],
        "errors": ended.errors[:_SHOWN],
        "bytes": max(len(ended.output), len(ended.errors)),
        "seconds": ended.seconds,
    }


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    try:
        found = _run(task)
    except SandboxKilled:
        found = {"killed": True}
    except SandboxError as error:
        found = {"failed": f"the sandbox failed, which ends the run: {error}"}
    except BaseException as error:
        found = {"failed": "".join(traceback.format_exception(error))}
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found | {"children": _children(), "largest_mib": usage.ru_maxrss >> 10, "worker_mib": _most_kib() >> 10}


def _children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _most_kib() -> int:
    """Of this process; ``getrusage`` includes what it was before it executed Python."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def main() -> None:
    user, other, python, generous = json.loads(sys.argv[1])
    sys._base_executable = python  # type: ignore[attr-defined]
    folder._NOBODY = other  # as which root's programs run
    for side in ("tests_side", "solution_side"):
        code._modules(side)
    # As on a machine that grants its users real-time priority.
    for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE) if generous else ():
        with contextlib.suppress(ValueError):  # a root without CAP_SYS_RESOURCE
            resource.setrlimit(kind, (20, 20))
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # its files in /proc are its own
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
