"""Program of a part's processes: ``python -m bench.acceptance.worker CALL``, where CALL is a JSON file.

Calls one function with a context and its arguments. A generator's first item is sent immediately, each further one
when a line arrives on standard input; at end of input the generator is closed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

from bench.acceptance.channel import Channel
from bench.acceptance.part import Context
from rlhpc.core.errors import one_line
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.redaction import guard_output, redact


def main() -> None:
    channel = Channel.take_stdout()
    guard_output()
    faulthandler.enable()
    call = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    die_with(ProcessId(**call["parent"]))
    try:
        for module in call["imports"]:
            importlib.import_module(module)
        channel.send("ready", None)
        sys.stdin.readline()
        context = Context(Path(call["folder"]), call["size"], call["on_gpu"], channel.report, channel.log)
        result = import_attribute(call["function"], "acceptance")(context, **call["arguments"])
        if isinstance(result, Generator):
            _serve(channel, result)
        channel.send("done", None if isinstance(result, Generator) else result)
    except BaseException as error:
        traceback.print_exc()
        _send_failure(channel, error)
        _end(1)
    _end(0)


def _serve(channel: Channel, items: Generator[Any, None, None]) -> None:
    with contextlib.closing(items):
        channel.send("answer", next(items))
        for _ in sys.stdin:
            channel.send("answer", next(items))


def _send_failure(channel: Channel, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the part may be gone
        channel.send("failed", f"{type(error).__name__}: {redact(one_line(str(error)))[:400]}")


def _end(code: int) -> None:
    """Exit without interpreter shutdown, which frees all of torch and vLLM and may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
