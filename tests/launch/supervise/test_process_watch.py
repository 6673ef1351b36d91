"""What a rank's log says of a crash of the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.launch.supervise.local import _fatal_error

_FATAL = "Fatal Python error: "
_OWN = "\n\nCurrent thread 0x02 (most recent call first):"
_STACKS = """
Thread 0x01 (most recent call first):
  File "/x/other.py", line 3 in wait

Current thread 0x02 (most recent call first):
  File "/own.py", line 7 in compute
  File "/x/main.py", line 1 in <module>
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("all is well\n", ""),
        (f"a step\n{_FATAL}Segmentation fault\n{_STACKS}", "crashed: Segmentation fault in compute (/own.py, line 7)"),
        (f"{_FATAL}Aborted{_OWN}\n  <no Python frame>\n", "crashed: Aborted"),
        (f"{_FATAL}Aborted{_OWN}", "crashed: Aborted"),
        (f"{_FATAL}Aborted\n{_FATAL}Bus error", "crashed: Bus error"),
        (f"a step\n{_FATAL}", "crashed: "),
    ],
    ids=["none", "stacks", "no frame", "cut in the stack", "the last one", "cut in its line"],
)
def test_a_crash_is_named_with_the_function_where_it_was(tmp_path: Path, log: str, message: str) -> None:
    (tmp_path / "log").write_text(log)
    assert _fatal_error(tmp_path / "log") == message
