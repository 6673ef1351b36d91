"""Output of all parts in one file of bounded size."""

from __future__ import annotations

from pathlib import Path

from rlhpc.core.text import printable

LOG = "acceptance.log"  # in the folder of results
_HEAD, _TAIL = 128 << 10, 384 << 10  # bytes stored per part
_WHOLE = 12 << 20  # bytes stored in total; the oldest are dropped first
_TAIL_LINES, _LINE_CHARACTERS = 40, 400


def append_log(log: Path, title: str, output: Path) -> None:
    """Append a part's output, without its middle if it is long. Edits the file in place, because it is locked."""
    text = f"\n===== {title} =====\n".encode() + _shortened(output)
    with open(log, "r+b") as file:
        data = file.read() + text
        data = data[-_WHOLE:]
        file.seek(0)
        file.write(data)
        file.truncate()


def last_lines(output: Path) -> list[str]:
    """Last lines of a part's output, for the page."""
    text = _end(output, _TAIL_LINES * _LINE_CHARACTERS).decode(errors="replace")
    return [printable(line)[:_LINE_CHARACTERS] for line in text.splitlines()[-_TAIL_LINES:]]


def _shortened(output: Path) -> bytes:
    size = output.stat().st_size
    if size <= _HEAD + _TAIL:
        return output.read_bytes()
    with open(output, "rb") as file:
        head = file.read(_HEAD)
    return head + f"\n... {size - _HEAD - _TAIL:,} bytes left out ...\n".encode() + _end(output, _TAIL)


def _end(output: Path, count: int) -> bytes:
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - count))
        return file.read()
