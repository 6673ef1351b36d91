"""What is only shown ends nothing: it is reported once, and the work and its exit code are as they would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.core.folder import RunFolder
from rlhpc.core.shown import ShownOnly, read_report, show

ROOT = Path(__file__).parents[2]
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}


def test_the_first_failure_is_one_line_and_the_others_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    guard, done = ShownOnly("the plot"), []
    for number in range(3):
        with guard:
            raise ValueError(f"axis {number}\nis  NaN")
        done.append(number)
    assert done == [0, 1, 2]
    assert guard.failed
    line = "rlhpc: warning: continuing without the plot, which failed: ValueError: axis 0 is NaN\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_passes(kind: type[BaseException]) -> None:
    with pytest.raises(kind), ShownOnly("the plot"):
        raise kind


def test_what_is_shown_is_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    show("one")
    show("two", end="", file=sys.stderr)
    assert capsys.readouterr() == ("one\n", "two")


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    lines = ["import sys", "from rlhpc.core.shown import ShownOnly, show, use_escapes", code]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], **{"cwd": ROOT, "text": True, "env": BUFFERED, **options}
    )  # type: ignore[call-overload]


def test_a_full_disk_loses_the_output_and_nothing_else() -> None:
    """Without care Python tries again at the end of the process, and ends it with 120."""
    code = "for _ in range(5): show('line')\nwith ShownOnly('x'): print('buffered'); raise OSError\nsys.exit(7)"
    with open("/dev/full", "w") as full:
        done = run(code, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 7
        assert len(done.stderr.splitlines()) == 2
        assert "continuing without the output, which failed: OSError: [Errno 28]" in done.stderr
        assert run(code, stdout=full, stderr=full).returncode == 7


def test_output_returns_when_there_is_room_again(tmp_path: Path) -> None:
    code = (
        "import os\nkept, full = os.dup(1), os.open('/dev/full', os.O_WRONLY)\n"
        "show('before')\nos.dup2(full, 1)\nshow('lost')\nos.dup2(kept, 1)\nshow('after')"
    )
    done = run(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "before\nafter\n")


def test_closed_streams_are_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, "from rlhpc.core.shown import show\nshow('a')"],
        cwd=ROOT,
    )
    assert done.returncode == 0


def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    environ = {**BUFFERED, "PYTHONIOENCODING": "ascii"}
    done = run("show('caf\\xe9 \\u2026')\nuse_escapes()\nprint('\\u2026')", env=environ, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\u2026\n\\u2026\n", "")


def test_a_report_is_the_evaluation_s_table_or_else_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    assert read_report(folder) == ""
    folder.report.mkdir()
    folder.page.touch()
    assert read_report(folder) == f"page: {folder.page}"
    folder.report_text.write_bytes(b"caf\xe9\n\n")
    assert read_report(folder) == "caf�"
    assert capsys.readouterr().err == ""
