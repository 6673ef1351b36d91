"""Interpreter of tests by statements: runs them on objects of a solution in another process. Runs in the sandbox.

Names that the tests do not define are the solution's. Its plain values arrive as copies, so that comparisons happen
here; its other objects are handles, which cannot be compared.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import types

from rlhpc.rewards.wire import SHARED, References, Wire

TYPE_CHECKING = False
if TYPE_CHECKING:  # both take long to import
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

_ALIASES = {"np": "numpy", "pd": "pandas"}
_SHOWN = ("__name__", "__doc__", "__dict__", "__module__", "__qualname__")


class Statements(References):
    """The tests' side of a connection, with the objects of the solution and the functions passed to it."""

    def __init__(self, reading: int, writing: int) -> None:
        self._wire = Wire(reading, writing, self)
        self._handles: dict[int, Any] = {}
        self._functions: list[Any] = []

    # ---- references

    def refer(self, value: Any) -> Any:
        if type(value) is Handle:
            return ("object", object.__getattribute__(value, "key"))
        if isinstance(value, type) and issubclass(value, BaseException) and "key" in vars(value):
            return ("object", vars(value)["key"])
        if callable(value):
            self._functions.append(value)
            return ("function", len(self._functions) - 1)
        raise TypeError(f"{type(value).__name__} objects of tests cannot be passed to the solution")

    def resolve(self, reference: Any) -> Any:
        kind, key, *more = reference
        if kind == "own":
            return self._functions[key]
        if key not in self._handles:
            self._handles[key] = _error_class(key, *more) if kind == "error" else Handle(key, self)
        return self._handles[key]

    # ---- messages

    def ask(self, operation: str, *given: Any) -> Any:
        """The solution's answer to a request; raises what the solution raises."""
        self._wire.send((operation, *given))
        while True:
            kind, *answer = self._wire.receive()
            if kind != "call":
                break
            self._call(*answer)
        value, rest, changed, text = answer if kind == "raised" else (answer[0], (), *answer[1:])
        sys.stdout.write(text)
        if kind == "raised":
            raise _error(value, rest)
        if operation == "call":
            _change({**dict(enumerate(given[1])), **given[2]}, changed)
        return value

    def name(self, name: str) -> Any:
        """A global name of the solution; a KeyError without it."""
        kind, value = self.ask("name", name)
        if kind == "value":
            return value
        wanted = _ALIASES.get(name, name)
        module, _, last = value.rpartition(".")
        if value == wanted and value in SHARED:
            return __import__(value)
        if last == name and module in SHARED:
            return getattr(__import__(module), name)
        raise KeyError(name)

    def _call(self, key: int, positional: Any, named: Any) -> None:
        try:
            self._wire.send(("result", self._functions[key](*positional, **named)))
        except Exception as error:
            kind = type(error) if getattr(builtins, type(error).__name__, None) is type(error) else RuntimeError
            self._wire.send(("failed", kind, [str(part) for part in error.args]))


class Handle:
    """An object of the solution. What it is used for is asked of the solution, except comparisons and arithmetic, whose
    operands could be the expected values."""

    __slots__ = ("key", "tests")

    def __init__(self, key: int, tests: Statements) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "tests", tests)

    def _ask(self, operation: str, *given: Any) -> Any:
        return object.__getattribute__(self, "tests").ask(operation, self, *given)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SHOWN:
            return object.__getattribute__(self, name)
        return Handle._ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        Handle._ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        Handle._ask(self, "delete", name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return Handle._ask(self, "call", positional, named)

    def __getitem__(self, key: Any) -> Any:
        return Handle._ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        Handle._ask(self, "set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        Handle._ask(self, "delete_item", key)

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(Handle._ask(self, "iter"))

    def __next__(self) -> Any:
        return Handle._ask(self, "next")

    def __reversed__(self) -> Iterator[Any]:
        return _Iterator(Handle._ask(self, "reversed"))

    def __len__(self) -> int:
        return int(Handle._ask(self, "len"))

    def __bool__(self) -> bool:
        return bool(Handle._ask(self, "bool"))

    def __str__(self) -> str:
        return str(Handle._ask(self, "str"))

    def __repr__(self) -> str:
        return str(Handle._ask(self, "repr"))

    def __format__(self, form: str) -> str:
        return str(Handle._ask(self, "format", form))

    def __int__(self) -> int:
        return int(Handle._ask(self, "int"))

    def __index__(self) -> int:
        return int(Handle._ask(self, "index"))

    def __float__(self) -> float:
        return float(Handle._ask(self, "float"))

    def __round__(self, *digits: int) -> Any:
        return Handle._ask(self, "round", *digits)

    def __copy__(self) -> Any:
        return Handle._ask(self, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return Handle._ask(self, "deepcopy")

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Handle and bool(Handle._ask(value, "isinstance", self))

    def __enter__(self) -> Any:
        return Handle._ask(self, "get", "__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return Handle._ask(self, "get", "__exit__")(None, None, None)

    def __eq__(self, other: object) -> bool:
        _refuse()

    def __ne__(self, other: object) -> bool:
        _refuse()

    __hash__ = None  # type: ignore[assignment]


class _Iterator:
    """Iterates over an object of the solution."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._handle)


class _Names(dict):
    """Globals of the tests. Built-in names are Python's, unless the tests use no other name."""

    def __init__(self, tests: Statements, texts: Sequence[str]) -> None:
        super().__init__(__name__="solution")
        self._tests = tests
        used = _used("\n".join(texts))
        self._own = used if len(used) == 1 else set()

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and name not in self._own):
            raise KeyError(name)
        return self._tests.name(name)


class _Module(types.ModuleType):
    """The solution, as the tests import it."""

    def __init__(self, tests: Statements) -> None:
        super().__init__("solution")
        self._tests = tests

    def __getattr__(self, name: str) -> Any:
        try:
            if not name.startswith("__"):
                return self._tests.name(name)
        except KeyError:
            pass
        raise AttributeError(name)


def _used(text: str) -> set[str]:
    """Names in a program, with attributes."""
    try:
        codes = [compile(text, "test.py", "exec")]
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for code in codes:
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return names


def _refuse() -> NoReturn:
    raise TypeError("objects of the solution cannot be compared: compare their attributes")


def _error_class(key: int, name: str, base: str) -> type:
    kind = getattr(builtins, base)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError(f"{base} is not an exception")
    return type(str(name), (kind,), {"key": key})


def _error(kind: Any, given: Any) -> BaseException:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return TypeError("the solution raised no exception")
    try:
        return kind(*given)
    except Exception:
        return RuntimeError(*given)


def _change(arguments: dict[Any, Any], changed: Any) -> None:
    """Applies what the solution changed of the arguments to the tests' own objects."""
    for key, new in changed.items():
        old = arguments[key]
        if type(old) is not type(new):
            raise TypeError("the solution changed the type of an argument")
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)


def main(solution: str, texts: Sequence[str]) -> None:
    """Entry point: answers from standard input, requests to standard output, the number of passed tests to standard
    error."""
    reading, writing, verdict = (os.dup(stream) for stream in (0, 1, 2))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    tests = Statements(reading, writing)
    sys.stdout = io.TextIOWrapper(io.FileIO(nothing, "w"), encoding="utf-8", write_through=True)
    tests.ask("start", solution)
    sys.modules["solution"] = _Module(tests)
    names, passed = _Names(tests, texts), 0
    for text in texts:
        try:
            exec(compile(text, "test.py", "exec"), names)
        except BaseException:
            continue
        passed += 1
    os.write(verdict, b"%d" % passed)
    os._exit(0)
