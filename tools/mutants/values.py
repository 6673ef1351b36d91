"""Odd values: of every type, size and encoding that a file or a command line can hold."""

from __future__ import annotations

import random
from typing import Any


class Raw(str):
    """YAML as it is to be written, for what no value of Python dumps as."""

    __slots__ = ()


LONG = ("n" * 256, "long/" * 1000, "x" * 70_000)
PATHS: tuple[Any, ...] = (
    *("", ".", "..", "/", "~", "nowhere", "model/nowhere", "config.yaml/inside", "/dev/zero", "/dev/null", "/dev/full"),
    *("/proc/self/mem", "/root/secret", "train.jsonl", "model", "reward", "template.jinja", "train.parquet", "\0"),
    "a\0b",
    *("n" * 256 + ".jsonl", "long/" * 1000, "\ud800", "a\nb", "%j", "*", "…/ü", "-", "--check", "file:///x"),
)
STRINGS: tuple[Any, ...] = (
    *("", " ", "none", "null", "true", "1", "nan", "a b", "a.b", "..", "a/b", "\0", "\ud800", "\x1b[31m", "\u202e"),
    *("{}", "[]", "${HOME}", "$(id)", "%s", "{x}", "ünïcödé", "名前", "a:b", "os:system", "a.b:c.d", "mine:nothing"),
    *("nowhere.at.all:score", ":", "mine:", ":score", "mine:score.x", "1:2", "mine:score\n", *LONG),
)
HUGE = (10**6, 10**9, 2**31, 2**63 - 1, 2**64, 10**18, 10**30, 10**400, -(10**18))
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 5, 7, 17, 100, 1000, 4096, 0.5, -0.5, 1.5, 2.0, 1e-9, 1e-300, 5e-324, 1e300, *HUGE),
    *(float("nan"), float("inf"), float("-inf")),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1, 2], ["a"], {"a": 1}, {"a": {"b": []}}, [None], {"": ""})
RAW = tuple(
    Raw(text)
    for text in (
        *("9" * 4301, "-" + "9" * 5000, "0x" + "f" * 5000, "1e99999", "1e-99999", "0o777", "0x1F", "1_000", "+.inf"),
        *("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!int a", "!!float b", "!!binary x"),
        *("!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2024-01-01", "!mine 1", "!!str 1", "!!null a", "!!bool x"),
        *("&a [*a]", "&a {b: *a}", "*missing", "&a 1", "{<<: {a: 1}}", "{<<: 1}", "{<<: [1]}", "? [a] : b"),
        *("{1: 2}", "{null: 1}", "{[a]: 1}", "{{a: 1}: 2}", "{1.5: 2}", "{true: 1, false: 2}", "{a: 1, a: 2}"),
        *("[", "]", "{", "}", "'", '"', '"\\x', "|", ">", "%", "@", "`", "- -", "a: b: c", "\t", "#", "---", "..."),
        ",",
        *("[" * 200 + "]" * 200, "[" * 5000 + "]" * 5000, "{a: " * 1000 + "1" + "}" * 1000, '"\\ud800"', '"\\0"'),
    )
)


def odd_value(rng: random.Random) -> Any:
    """Any of them, each kind as often as the others."""
    return rng.choice(rng.choice((PATHS, STRINGS, NUMBERS, OTHERS, RAW)))


def bomb(rng: random.Random) -> str:
    """A YAML document of a few lines whose aliases stand for millions of items."""
    levels, width = rng.choice(((9, 9), (6, 20), (30, 2))), 0
    count, width = levels
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]" for level in range(1, count)]
    return "\n".join(lines) + "\n"


def garbage(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """The data with damage that a copy, a disk or an editor may do."""
    at = rng.randrange(len(data) + 1)
    ways: dict[str, bytes] = {
        "empty": b"",
        "truncated": data[:at],
        "one byte changed": data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        "bytes inserted": data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:],
        "bytes removed": data[:at] + data[at + rng.randint(1, 20) :],
        "NUL inserted": data[:at] + b"\0" + data[at:],
        "not UTF-8": data[:at] + b"\xff\xfe" + data[at:],
        "UTF-16": data.decode("latin-1").encode("utf-16"),
        "byte-order mark": b"\xef\xbb\xbf" + data,
        "twice": data + data,
        "random": rng.randbytes(rng.randint(1, 300)),
        "Windows lines": data.replace(b"\n", b"\r\n"),
        "deep": b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "long number": b'{"a": ' + b"9" * 5000 + b"}",
        "surrogate": b'{"\\ud800": "\\udfff"}',
        "a number": b"5",
        "a list": b"[1, 2]",
        "a string": b'"text"',
        "null": b"null",
        "NaN": b"NaN",
    }
    way = rng.choice([*ways])
    return way, ways[way]


def shown(value: Any) -> str:
    """The value in a line of the table."""
    text = repr(str(value)) if isinstance(value, Raw) else _repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


def _repr(value: Any) -> str:
    return "an integer of 401 digits" if isinstance(value, int) and value > 10**100 else repr(value)
