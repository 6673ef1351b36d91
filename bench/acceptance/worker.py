"""Program of acceptance's processes: ``python -m bench.acceptance.worker CALL``, where CALL is a JSON file.

Calls one function with a context and its arguments. Messages go to the original standard output, one JSON object per
line; what libraries print goes to the log instead. A generator's first item is sent immediately, each further one when
a line arrives on standard input; at end of input the generator is closed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from bench.acceptance.results import Context, Figure, Skipped
from rlhpc.core.errors import UserError, one_line
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.redaction import guard_output, redact

_STACKS_SECONDS = 1.0  # before its deadline, a hanging part dumps its stacks to its output
_LEAST_SECONDS = 0.01  # faulthandler rejects a deadline in the past


def main() -> None:
    sys.stdout.flush()
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    guard_output()
    faulthandler.enable()
    call = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    die_with(ProcessId(**call["parent"]))
    if call["deadline"] is not None:
        left = call["deadline"] - time.monotonic() - _STACKS_SECONDS
        faulthandler.dump_traceback_later(max(_LEAST_SECONDS, left))
    code = _run(call, messages)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines and process groups may hang or crash during interpreter shutdown


def _run(call: dict[str, Any], messages: TextIO) -> int:
    def send(kind: str, value: Any) -> None:
        messages.write(json.dumps({"kind": kind, "value": value}, default=lambda scalar: scalar.item()) + "\n")
        messages.flush()

    def report(result: Figure | Skipped) -> None:
        send("figure" if isinstance(result, Figure) else "skipped", asdict(result))

    def log(text: str) -> None:
        print(text, flush=True)
        send("log", text)

    try:
        for module in call["imports"]:
            importlib.import_module(module)
        sys.stdin.readline()
        context = Context(Path(call["folder"]), call["size"], call["on_gpu"], report, log)
        result = import_attribute(call["function"], "acceptance")(context, **call["arguments"])
        if isinstance(result, Generator):
            with contextlib.closing(result):
                send("answer", next(result))
                for _ in sys.stdin:
                    send("answer", next(result))
        send("done", None if isinstance(result, Generator) else result)
    except BaseException as error:
        traceback.print_exc()
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # the part may be gone
            send("failed", redact(one_line(message))[:500])
        return 1
    return 0


if __name__ == "__main__":
    main()
