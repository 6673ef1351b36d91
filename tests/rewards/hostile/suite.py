"""Runs hostile programs in a setting (user and isolation), and finds what they harmed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.rewards.hostile.around import Around, canaries, free_user, until_gone
from tests.rewards.hostile.program import ESCAPED, TRIED, Program, Response, joined
from tests.rewards.users import PYTHON, ROOT

LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1
LIMITS = {"seconds": 5, "memory_mib": 256, "processes": 8, "file_mib": 4, "folder_mib": 32}
_ROOM_MIB = 64  # of a process beyond its memory limit: its files, and those of the worker
_WORKER_MIB = 200  # of the worker that reads a program's output
LATE = ("it took", "it did not finish: exit code None")  # beginnings of harm
_LATE_SECONDS = 15.0  # by the clock, of a busy machine
_LOOK_SECONDS = 0.02
_NOISE_MIB = 300  # of other programs of this machine, in a program that is examined for memory


@dataclass(frozen=True)
class Setting:
    """Who runs programs, and how they are isolated."""

    who: Literal["user", "root"]
    isolation: Literal["namespaces", "filter"]

    def promises(self, program: Program | Response) -> bool:
        return self.isolation == "namespaces" or not (program.unpromised or (program.landlock and not LANDLOCK))

    def __str__(self) -> str:
        return f"{self.who}, {self.isolation}"


SETTINGS = [Setting(who, isolation) for isolation in ("namespaces", "filter") for who in ("user", "root")]  # type: ignore[arg-type]


@dataclass
class Suite:
    """A process that runs sandboxes, with canaries around it."""

    setting: Setting
    around: Around
    process: subprocess.Popen[str]
    harmed: bool = field(default=False)

    def harm(self, program: Program | Response) -> list[str]:
        """What one program did that the page promises it cannot."""
        if isinstance(program, Response):
            task = {"text": program.text, "tests": program.tests, "limits": {}}
            return self._harm_of(task, lambda found: _scored(found))
        limits = {**LIMITS, **program.limits}
        task = {"text": program.source(self.around.names), "within": program.within}
        return self._harm_of({**task, "limits": limits}, lambda found: _ended(program, found), program.most_mib)

    def harm_together(self, programs: Sequence[Program]) -> list[str]:
        """As ``harm``, for programs that share a sandbox."""
        text = joined(list(programs), self.around.names)
        task = {"text": text, "within": 60.0, "limits": {**LIMITS, "seconds": 20}}

        def ended(found: dict[str, Any]) -> list[str]:
            lines = found.get("output", "").splitlines()
            missing = [p.name for p in programs if f"{TRIED} {p.name}" not in lines]
            return [*_escapes(found), *(f"{name} did not finish: {_shown(found)}" for name in missing[:1])]

        return self._harm_of(task, ended)

    def _harm_of(self, task: dict[str, Any], ended: Any, most_mib: int | None = None) -> list[str]:
        before = self.around.state(self.process.pid)
        found, taken = self._ask(task)
        left = until_gone(self.around, self.process.pid)
        after = self.around.state(self.process.pid)
        harm = [f"{key} changed: {_difference(before[key], after[key])}" for key in before if before[key] != after[key]]
        harm += [f"processes are left: {sorted(left)}"] if left or found.get("children") else []
        harm += [found["failed"]] if "failed" in found else []
        most = task["limits"].get("memory_mib", LIMITS["memory_mib"]) + _ROOM_MIB
        if "tests" not in task and found.get("largest_mib", 0) > most:
            harm.append(f"a process had {found['largest_mib']} MiB")
        if found.get("worker_mib", 0) > _WORKER_MIB:
            harm.append(f"the worker had {found['worker_mib']} MiB")
        if most_mib is not None and taken > most_mib + _NOISE_MIB:
            harm.append(f"{taken} MiB of the machine's memory were used")
        text = found.get("output", "") + found.get("errors", "")
        harm += [f"it read a secret of {what}" for what, one in self._secrets().items() if one in text]
        harm += ended(found)
        self.harmed = self.harmed or bool(harm)
        return harm

    def _secrets(self) -> dict[str, str]:
        return {"a file": self.around.file_secret, "a process": self.around.process_secret}

    def _ask(self, task: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The worker's answer, and the MiB by which the machine's available memory fell meanwhile."""
        whole = {"paths": [str(self.around.top / "shown")], **task, "isolation": self.setting.isolation}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = least = _available()
        self.process.stdin.write(json.dumps(whole) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + 180
        while not select.select([self.process.stdout], [], [], _LOOK_SECONDS)[0]:
            least = min(least, _available())
            if time.monotonic() > deadline:
                return {"failed": "no answer"}, 0
        line = self.process.stdout.readline()
        return (json.loads(line) if line else {"failed": "the worker was killed"}), before - least


def _available() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) >> 10


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return ", ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys)[:600]
    return f"{before} -> {after}"[:600]


def _escapes(found: dict[str, Any]) -> list[str]:
    lines = (found.get("output", "") + found.get("errors", "")).splitlines()
    return [line for line in lines if line.startswith(ESCAPED)]


def _ended(program: Program, found: dict[str, Any]) -> list[str]:
    """What is wrong with a program's end."""
    wrong = _escapes(found)
    if "killed" in found or "failed" in found:
        return wrong
    if program.finishes and (found["code"] != 0 or f"{TRIED} {program.name}" not in found["output"]):
        wrong.append(f"it did not finish: {_shown(found)}")
    if not program.finishes and "SyntaxError" in found["errors"]:
        wrong.append(_shown(found))
    longest = min(3 * {**LIMITS, **program.limits}["seconds"], program.within)
    if found["seconds"] > longest + _LATE_SECONDS:
        wrong.append(f"it took {found['seconds']:.1f} s")
    if found["bytes"] > {**LIMITS, **program.limits}["file_mib"] << 20:
        wrong.append(f"it printed {found['bytes']} bytes")
    return wrong


def _scored(found: dict[str, Any]) -> list[str]:
    return [f"its score is {found['score']}"] if found.get("score", 0) != 0 else []


def _shown(found: dict[str, Any]) -> str:
    return f"exit code {found.get('code')}, {found.get('output', '')[-300:]!r}, {found.get('errors', '')[-600:]!r}"


@contextlib.contextmanager
def suite(setting: Setting, *, generous: bool = False) -> Iterator[Suite]:
    """``generous``: the machine lets its users raise priorities."""
    user = free_user()
    with canaries(user) as around:
        given = json.dumps([user if setting.who == "user" else 0, user, PYTHON, generous])
        environment = {**os.environ, "TMPDIR": str(around.public), "CANARY": around.process_secret}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rewards.hostile.worker", given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == "ready"
            yield Suite(setting, around, process)
        finally:
            process.kill()
            process.wait()
