"""CPU time of a sandbox, which every program in a response costs; limit: 40 ms for a program."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

from rlhpc.rewards.code import python
from rlhpc.rewards.sandbox import Isolation, Limits, Sandbox
from tests.rewards.users import PYTHON

ROUNDS = 50
RESPONSE = "```python\ndef add(x, y):\n    return x + y\n```"
ISOLATIONS: tuple[Isolation, ...] = ("namespaces", "filter")


def main() -> None:
    if os.geteuid() == 0 and os.path.exists(PYTHON):
        sys._base_executable = PYTHON  # type: ignore[attr-defined]  # root's programs run as nobody, who must read it
    cases: dict[str, Callable[[], object]] = {}
    for isolation in ISOLATIONS:
        cases[f"program, {isolation}"] = _program(Sandbox(Limits(), isolation))
        cases[f"statements, {isolation}"] = _statements(isolation)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for round_ in range(ROUNDS + 1):  # alternating, so that changes of the machine's speed affect all
        for name, run in cases.items():
            cpu, wall = _cpu(), time.perf_counter()
            run()
            if round_:  # the first reads files
                measured[name].append((_cpu() - cpu, time.perf_counter() - wall))
    print(f"CPU time of a sandbox, median of {ROUNDS}; a response with statements takes two; limit of a program: 40 ms")
    for name, values in measured.items():
        cpu, wall = (statistics.median(each) * 1000 for each in zip(*values, strict=True))
        print(f"  {name:<24}{cpu:7.1f} ms CPU {wall:7.1f} ms by the clock")


def _program(sandbox: Sandbox) -> Callable[[], object]:
    def run() -> None:
        assert sandbox.run("print(1)").output == "1\n"

    return run


def _statements(isolation: Isolation) -> Callable[[], object]:
    def run() -> None:
        assert python("", RESPONSE, ["assert add(1, 2) == 3"], {}, isolation=isolation)["score"] == 1

    return run


def _cpu() -> float:
    """Seconds of this process and its children."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


if __name__ == "__main__":
    main()
