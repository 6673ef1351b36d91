"""Output that no work depends on: progress, reports. A failure is reported once, and the work continues."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from types import TracebackType
from typing import Any, TextIO

from rlhpc.core.errors import one_line
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import redact
from rlhpc.core.text import printable

_LONGEST = 300  # characters of a reported error


class ShownOnly:
    """Reusable context for code that only shows something. The first exception is reported in a line on stderr and
    suppressed; later ones are suppressed silently. Ctrl-C passes."""

    def __init__(self, what: str) -> None:
        self.what, self.failed = what, False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        _drop_unwritten(sys.stdout)
        if not self.failed:
            self.failed = True
            reason = redact(one_line(f"{type(error).__name__}: {error}"))[:_LONGEST]
            text = f"rlhpc: warning: continuing without {self.what}, which failed: {reason}"
            _print(printable(text), sys.stderr)
        return True


_output = ShownOnly("the output")


def show(text: str, end: str = "\n", file: TextIO | None = None, *, start: str = "") -> None:
    """Prints, on stdout by default, without the text's control characters; ``start`` and ``end`` may have some. Output
    to a closed terminal or a full disk is lost."""
    with _output:
        error = _print(start + printable(text), sys.stdout if file is None else file, end)
        if error is not None:
            raise error


def read_report(folder: RunFolder) -> str:
    """Table of a finished evaluation, otherwise the path of the run's page; empty if neither can be read."""
    with ShownOnly("the report"):
        if folder.report_text.is_file():
            return folder.report_text.read_text(encoding="utf-8", errors="replace").rstrip()
        if folder.page.is_file():
            return f"page: {folder.page}"
    return ""


def use_escapes() -> None:
    """Makes this process print characters that the terminal's encoding lacks as escapes such as \\u2026."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _print(text: str, stream: TextIO | None, end: str = "\n") -> Exception | None:
    """Prints; returns the error if it failed."""
    if stream is None:  # closed before this process began
        return None
    try:
        try:
            print(text, end=end, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding
            print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, file=stream, flush=True)
    except (OSError, ValueError) as error:
        _drop_unwritten(stream)
        return error
    return None


def _drop_unwritten(stream: Any) -> None:
    """Empties the buffer of a stream that cannot be written. Python would write it at exit, fail, and change the exit
    code."""
    stream = getattr(stream, "rich_proxied_file", stream)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            stream.flush()
        except OSError:
            number = stream.fileno()
            original, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, number)
                stream.flush()
            finally:
                os.dup2(original, number)
                os.close(original)
                os.close(nowhere)
