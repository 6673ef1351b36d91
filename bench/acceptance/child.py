"""A part's own process: ``python -m bench.acceptance.child SPEC``, started by the driver.

Results go to a file, one JSON object per line, so that none is lost with the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.acceptance.part import Context, Figure, Size, Skipped
from rlhpc.core.errors import EXIT_USER_ERROR, UserError, one_line
from rlhpc.core.imports import import_attribute
from rlhpc.core.process import ProcessId, die_with
from rlhpc.core.redaction import guard_output, redact

_STACKS_SECONDS = 1.0  # before its deadline, a hanging part dumps its stacks to its output
_LEAST_SECONDS = 0.01  # faulthandler rejects a deadline in the past
_LONGEST_MESSAGE = 500


@dataclass(frozen=True)
class Spec:
    """Input of a part's process, passed as JSON."""

    function: str
    folder: str
    results: str
    size: Size
    on_gpu: bool
    deadline: float  # monotonic clock, shared by all processes of a machine
    driver_pid: int
    driver_start: int

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


class _Results:
    """Appends results to the file, each in a single write so that readers never see half a line."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def report(self, result: Figure | Skipped) -> None:
        kind = "figure" if isinstance(result, Figure) else "skipped"
        self.write(kind, asdict(result))

    def write(self, kind: str, value: Any) -> None:
        # Python's json reads and writes NaN. Scalars of numpy and torch become Python's.
        line = json.dumps({kind: value}, default=lambda scalar: scalar.item()) + "\n"
        os.write(self._descriptor, line.encode())


def run(spec: Spec) -> int:
    """Call the part's function and return the exit code."""
    results = _Results(Path(spec.results))
    context = Context(Path(spec.folder), spec.size, spec.on_gpu, results.report)
    try:
        import_attribute(spec.function, "part")(context)
    except UserError as error:
        print(f"rlhpc: {error}", file=sys.stderr)
        results.write("error", str(error))
        return EXIT_USER_ERROR
    except BaseException as error:
        traceback.print_exc()
        results.write("error", redact(one_line(f"{type(error).__name__}: {error}"))[:_LONGEST_MESSAGE])
        return 1
    return 0


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    guard_output()
    die_with(ProcessId(spec.driver_pid, spec.driver_start))
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(_LEAST_SECONDS, spec.deadline - time.monotonic() - _STACKS_SECONDS))
    code = run(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines and process groups may hang or crash during interpreter shutdown


if __name__ == "__main__":
    main()
