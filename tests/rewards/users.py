"""Sandboxes of other users: of nobody, and of root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.rewards.sandbox import Limits

ROOT = Path(__file__).parents[2]
NOBODY = 65534
PYTHON = "/usr/bin/python3"  # everyone may read it, unlike one in root's home

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of another user")
needs_python = pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"no {PYTHON}")

# Starts as this user, imports what it needs, prepares itself, and runs programs in one sandbox.
_RUN = """
import ctypes, encodings.idna, json, os, sys
from rlhpc.core.errors import UserError
from rlhpc.rewards.sandbox import Limits, Sandbox, SandboxError
given = json.loads(sys.argv[1])
sys._base_executable = given["python"]
exec(given["prepare"])
try:
    sandbox = Sandbox(Limits(**given["limits"]), given["isolation"], paths=given["paths"])
    for program in given["programs"] or [sandbox.check()]:
        ended = sandbox.run(program or "")
        print(json.dumps([ended.code, ended.output, ended.errors]))
except (UserError, SandboxError) as error:
    print(json.dumps(str(error)))
"""
AS_NOBODY = f"os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)"
# An ordinary user who is root in a namespace where nobody else exists, as in a container without root.
AS_ROOT_OF_A_NAMESPACE = f"""{AS_NOBODY}
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # its files below /proc are its own again
ctypes.CDLL(None).unshare(0x10000000)
for name, line in (("setgroups", "deny"), ("uid_map", "0 {NOBODY} 1"), ("gid_map", "0 {NOBODY} 1")):
    with open(f"/proc/self/{{name}}", "w") as file:
        file.write(line)
"""


def run_as(
    prepare: str,
    *programs: str,
    isolation: str = "filter",
    setting: tuple[str, ...] = (),
    paths: tuple[str, ...] = (),
    **limits: Any,
) -> list[Any]:
    """(code, output, errors) of each program, in a process that first executes ``prepare``; a text is an error.

    Without a program it checks the sandbox.
    """
    bounds = {"seconds": 20, "memory_mib": 256, **limits}
    Limits(**bounds)
    given = {"python": PYTHON, "prepare": prepare, "limits": bounds, "isolation": isolation}
    text = json.dumps({**given, "programs": programs, "paths": paths})
    done = subprocess.run([*setting, sys.executable, "-c", _RUN, text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
