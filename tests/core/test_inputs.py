"""Reading what users give."""

import pytest

from rlhpc.core.errors import UserError
from rlhpc.core.inputs import MIB, read_lines


def test_lines_have_their_places_and_blank_ones_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"one\n\n  \ntwo\nthree")
    assert list(read_lines(file)) == [(f"{file}:1", b"one\n"), (f"{file}:4", b"two\n"), (f"{file}:5", b"three")]


def test_a_line_that_is_too_long_is_refused_with_its_place(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"short\n" + b"x" * MIB + b"\n")
    lines = read_lines(file, MIB)
    assert next(lines)[1] == b"short\n"
    with pytest.raises(UserError, match=f"{file}:2: is longer than 1 MiB"):
        next(lines)
