"""YAML as untrusted input: bounded in size, depth and what its aliases stand for; the types of JSON alone."""

from __future__ import annotations

import time

import pytest

from rlhpc.config import yaml12
from rlhpc.core.errors import UserError

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)
_MERGES = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 30))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: &a [*a]\n", "file:1: an alias stands for the value that it is in"),
        ("a: &a {b: {c: *a}}\n", "file:1: an alias stands for the value that it is in"),
        (_BOMB, "aliases stand for more than 20,000 values"),
        (_MERGES, "aliases stand for more than 20,000 values"),
        ("a:\n" + "- x\n" * 30_000, "more than 20,000 values"),
        ("[" * 500 + "]" * 500, "file:1: nested more than 64 deep"),
        ("[" * 50_000, "file:1: nested more than 64 deep"),
        ("".join(" " * depth + "a:\n" for depth in range(300)), "file:64: nested more than 64 deep"),
        ("a: " + "9" * 5000, "file:1: a number of 5,000 digits"),
        ("a: 0x" + "f" * 5000, "file:1: a number of 5,000 digits"),
        ("a: !!int b\n", "file:1: 'b' does not fit its tag !!int"),
        ("a: !!bool x\n", "file:1: 'x' does not fit its tag !!bool"),
        ("a: !!float [1]\n", "file:1: "),
        ("a: !!timestamp 2024-01-01\n", "file:1: the tag !!timestamp is not supported"),
        ("a: !!binary aGVsbG8=\n", "file:1: the tag !!binary is not supported"),
        ("a: !!set {b, c}\n", "file:1: the tag !!set is not supported"),
        ("a: !!python/object/apply:os.system ['true']\n", "file:1: the tag !!python/object/apply:os.system is not"),
        ("a: !mine 1\n", "file:1: the tag !mine is not supported"),
        ('a: "b\\0c"\n', "file:1: a text with the character '\\x00'"),
        ('a: "\\ud800"\n', "file:1: a text with the character '\\ud800'"),
        ('"a\\0": 1\n', "file:1: a text with the character '\\x00'"),
        ("a: " + "x" * 2**20, "file: is larger than 1 MiB"),
    ],
)
def test_documents_that_no_configuration_needs_are_refused(text, wrong):
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        yaml12.read(text, "file")
    assert wrong in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.process_time() - began < 10


def test_what_configurations_use_is_read():
    text = "a: &a {b: [1, 0x1F, 0o17, -2.5, 1e3, .inf]}\nc: {<<: *a, d: !!str 5}\ne: *a\nf: !!float 1\n"
    document = yaml12.read(text, "file")
    inner = {"b": [1, 31, 15, -2.5, 1000.0, float("inf")]}
    assert document.value == {"a": inner, "c": {**inner, "d": "5"}, "e": inner, "f": 1.0}
    assert (document.lines["c.d"], document.lines["a.b.4"]) == (2, 1)
    assert yaml12.read("", "file").value is None
