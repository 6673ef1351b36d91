"""JSON that commands print: valid for every reader. The fields of each command are in docs/scripting.md."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.cli.echo import echo


def json_text(value: Any, indent: int | None = 2) -> str:
    """The value as JSON; null in place of NaN and infinities, which JSON does not have."""
    return json.dumps(_finite(value), indent=indent, default=str).replace("\x7f", r"\u007f")


def run_printing(run: Callable[[], int], result: Path, *, as_json: bool) -> int:
    """Exit code of ``run``. With ``as_json`` its progress goes to stderr, the JSON file that it writes to stdout."""
    if not as_json:
        return run()
    with contextlib.redirect_stdout(sys.stderr):
        code = run()
    if not code:
        echo(json_text(json.loads(result.read_text(encoding="utf-8"))))
    return code


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(one) for one in value]
    return value
