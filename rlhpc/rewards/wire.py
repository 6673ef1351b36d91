"""Messages between the interpreter of the tests and that of the solution. Runs in the sandbox: standard library only.

A message is a length and an encoded value. Plain values are copied, and arrive as exactly their built-in type; both
sides exchange references to anything else. Reading a message runs no code of the sender.
"""

from __future__ import annotations

import builtins
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # both take long to import
    from collections.abc import Callable, Iterable
    from typing import Any

# Modules whose objects the tests may use by the names under which the solution imported them.
SHARED = (
    "math",
    "cmath",
    "random",
    "re",
    "string",
    "itertools",
    "functools",
    "collections",
    "heapq",
    "bisect",
    "operator",
    "statistics",
    "fractions",
    "decimal",
    "datetime",
    "copy",
    "json",
    "typing",
    "dataclasses",
    "enum",
    "numpy",
    "pandas",
)
_LARGEST = 64 << 20  # bytes of a message
_SINGLE: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b"E": Ellipsis}
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z"}
# Values of the standard library: how they are written as a plain value, and the method that reads it.
_VALUES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "decimal.Decimal": (str, ""),
    "fractions.Fraction": (str, ""),
    "collections.deque": (list, ""),
    "collections.Counter": (dict, ""),
    "datetime.date": (lambda value: value.isoformat(), "fromisoformat"),
    "datetime.time": (lambda value: value.isoformat(), "fromisoformat"),
    "datetime.datetime": (lambda value: value.isoformat(), "fromisoformat"),
}


class References:
    """Knowledge of one side about objects that are not plain values."""

    def refer(self, value: Any) -> Any:
        """A plain value that stands for an object."""
        raise NotImplementedError

    def resolve(self, reference: Any) -> Any:
        """Object of a reference of the other side."""
        raise NotImplementedError


class Wire:
    """A connection through two pipes. Ends the process when the other side ends."""

    def __init__(self, reading: int, writing: int, references: References) -> None:
        self._reading, self._writing, self._references = reading, writing, references

    def send(self, message: Any) -> None:
        body = encoded(message, self._references)
        rest = memoryview(len(body).to_bytes(8, "big") + body)
        while rest:
            rest = rest[os.write(self._writing, rest) :]

    def receive(self) -> Any:
        length = int.from_bytes(self._read(8), "big")
        if length > _LARGEST:
            os._exit(1)
        return _Reader(self._read(length), self._references).value()

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = os.read(self._reading, min(length, 1 << 16))
            if not part:
                os._exit(1)
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def encoded(value: Any, references: References) -> bytes:
    parts: list[bytes] = []
    _write(value, parts, references)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes], references: References) -> None:
    kind = type(value)
    if any(value is single for single in _SINGLE.values()):
        parts.append(next(tag for tag, single in _SINGLE.items() if value is single))
    elif kind in _SEQUENCES:
        _write_all(_SEQUENCES[kind], value, parts, references)
    elif kind is dict:
        _write_all(b"d", [part for pair in value.items() for part in pair], parts, references)
    elif isinstance(value, int):
        parts.append(b"i%s;" % hex(int.__index__(value)).encode())
    elif isinstance(value, float):
        parts.append(b"f%s;" % float.hex(value).encode())
    elif isinstance(value, str):
        _write_bytes(b"s", str.encode(value, "utf-8", "surrogatepass"), parts)
    elif isinstance(value, bytes | bytearray):
        _write_bytes(b"b" if isinstance(value, bytes) else b"B", bytes(value), parts)
    elif kind is complex:
        _write_all(b"c", (value.real, value.imag), parts, references)
    elif kind is range:
        _write_all(b"r", (value.start, value.stop, value.step), parts, references)
    elif (name := f"{kind.__module__}.{kind.__qualname__}") in _VALUES:
        _write_all(b"v", (name, _VALUES[name][0](value)), parts, references)
    elif kind.__module__ == "numpy":
        _write_array(value, parts, references)
    else:
        _write_other(value, parts, references)


def _write_other(value: Any, parts: list[bytes], references: References) -> None:
    """Subclasses of containers are copied as the container; the rest as references."""
    for kind, tag in _SEQUENCES.items():
        if isinstance(value, kind):
            return _write_all(tag, list(kind.__iter__(value)), parts, references)  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return _write(dict(value), parts, references)
    if isinstance(value, type) and getattr(builtins, kind_name := value.__name__, None) is value:
        return _write_bytes(b"g", kind_name.encode(), parts)
    parts.append(b"o")
    _write(references.refer(value), parts, references)


def _write_array(value: Any, parts: list[bytes], references: References) -> None:
    if hasattr(value, "dtype") and value.dtype.kind in "biufc":
        if getattr(value, "shape", ()) == ():
            return _write(value.item(), parts, references)
        return _write_all(b"a", (value.dtype.str, value.tolist()), parts, references)
    _write_other(value, parts, references)


def _write_all(tag: bytes, values: Iterable[Any], parts: list[bytes], references: References) -> None:
    given = list(values)
    parts.append(b"%s%d;" % (tag, len(given)))
    for value in given:
        _write(value, parts, references)


def _write_bytes(tag: bytes, value: bytes, parts: list[bytes]) -> None:
    parts.append(b"%s%d;" % (tag, len(value)))
    parts.append(value)


class _Reader:
    def __init__(self, data: bytes, references: References) -> None:
        self._data, self._at, self._references = data, 0, references
        self._made: dict[bytes, Callable[[list[Any]], Any]] = {
            b"l": list,
            b"t": tuple,
            b"e": set,
            b"z": frozenset,
            b"d": lambda values: dict(zip(values[::2], values[1::2], strict=True)),
            b"c": lambda values: complex(*values),
            b"r": lambda values: range(*values),
            b"v": _standard,
            b"a": lambda values: __import__("numpy").array(*values[::-1]),
        }

    def value(self) -> Any:
        tag = self._data[self._at : self._at + 1]
        self._at += 1
        if tag in _SINGLE:
            return _SINGLE[tag]
        if tag == b"o":
            return self._references.resolve(self.value())
        head = self._head()
        if tag == b"i":
            return int(head, 16)
        if tag == b"f":
            return float.fromhex(head)
        length = int(head)
        if tag in self._made:
            return self._made[tag]([self.value() for _ in range(length)])
        body = self._data[self._at : self._at + length]
        self._at += length
        if tag == b"s":
            return body.decode("utf-8", "surrogatepass")
        if tag == b"g":
            return _built_in(body.decode())
        return {b"b": bytes, b"B": bytearray}[tag](body)

    def _head(self) -> str:
        end = self._data.index(b";", self._at)
        head, self._at = self._data[self._at : end].decode(), end + 1
        return head


def _built_in(name: str) -> type:
    kind = getattr(builtins, name)
    if not isinstance(kind, type):
        raise TypeError(f"{name} is not a type")
    return kind


def _standard(values: list[Any]) -> Any:
    name, plain = values
    module, kind = name.split(".")
    made = getattr(__import__(module), kind) if name in _VALUES else _built_in("")
    reader = _VALUES[name][1]
    return getattr(made, reader)(plain) if reader else made(plain)
