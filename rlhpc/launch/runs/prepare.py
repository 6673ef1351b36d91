"""Runs the config's prepare function in a process of its own: it may import torch, the launcher must not."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

from rlhpc.config.schema import PrepareSection
from rlhpc.core.errors import UserError
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.redaction import guard_output, learn
from rlhpc.core.shown import show
from rlhpc.core.text import duration

_LINE_SECONDS = 5.0
_USER_ERROR, _INTERRUPTED = 2, 130


def run_prepare(section: PrepareSection) -> bool:
    """Calls the function and waits for it. A UserError in it is raised here; False after any other failure, whose
    traceback it has printed."""
    call = {"launcher": asdict(ProcessId.own()), **section.model_dump(mode="json")}
    read_end, write_end = os.pipe()
    with open(read_end, encoding="utf-8") as answer:
        command = [sys.executable, "-m", "rlhpc.launch.runs.prepare", str(write_end)]
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end], text=True)
        finally:
            os.close(write_end)
        began, given = time.monotonic(), [json.dumps(call)]
        while child.returncode is None:
            try:
                child.communicate(given.pop() if given else None, timeout=_LINE_SECONDS)
            except subprocess.TimeoutExpired:
                show(f"preparing | {duration(time.monotonic() - began)}")
        message = answer.read()
        if child.returncode == _USER_ERROR and message:
            raise UserError(message)
    return child.returncode == 0


def _main() -> None:
    guard_output()
    call = json.load(sys.stdin)
    learn(call["arguments"])
    die_with(ProcessId(**call["launcher"]))
    try:
        function = import_attribute(call["function"], "prepare.function")
        try:
            inspect.signature(function).bind(**call["arguments"])
        except TypeError as error:
            raise UserError(f"{call['function']}: {error}", where="prepare.arguments") from None
        function(**call["arguments"])
    except UserError as error:
        with open(int(sys.argv[1]), "w", encoding="utf-8") as answer:
            answer.write(str(error))
        sys.exit(_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    _main()
