"""Interpreter of a solution: does what the tests ask for, and answers with values. Runs in the sandbox.

The solution runs in this process and may change anything in it; it decides what the answers are, but not whether they
are right.
"""

from __future__ import annotations

import builtins
import io
import operator
import os
import sys
import types

from rlhpc.rewards.wire import SHARED, References, Wire, encoded

TYPE_CHECKING = False
if TYPE_CHECKING:  # both take long to import
    from collections.abc import Callable
    from typing import Any

_CHANGING = (list, dict, set, bytearray)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "isinstance": isinstance,
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    "reversed": reversed,
    **{kind.__name__: kind for kind in (iter, next, len, bool, str, repr, int, float, complex, round, format)},
    "index": operator.index,
}


class Solution(References):
    """The solution's module, and the objects of it that the tests have."""

    def __init__(self, reading: int, writing: int) -> None:
        self._wire = Wire(reading, writing, self)
        self._objects: list[Any] = []
        self._keys: dict[int, int] = {}
        self._names: dict[str, Any] = {}

    # ---- references

    def refer(self, value: Any) -> Any:
        """("own", key of a test's function), or (kind, key, name, built-in base class) of an object here."""
        if type(value) is _Function:
            return ("own", value.key)
        key = self._keys.setdefault(id(value), len(self._objects))
        if key == len(self._objects):
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ("error", key, value.__name__, _base(value))
        return ("object", key)

    def resolve(self, reference: Any) -> Any:
        kind, key = reference
        return self._objects[key] if kind == "object" else _Function(key, self)

    # ---- messages

    def serve(self) -> Any:
        """Answers requests until the result of a call to the tests."""
        while True:
            operation, *given = self._wire.receive()
            if operation == "result":
                return given[0]
            if operation == "failed":
                raise given[0](*given[1])
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogatepass", write_through=True)
            outer, sys.stdout = sys.stdout, printed
            answer: tuple[Any, ...]
            try:
                answer = ("done", *self._do(operation, given))
            except BaseException as error:
                answer = ("raised", type(error), error.args, {})
            finally:
                sys.stdout = outer
            text = printed.buffer.getvalue().decode("utf-8", "replace")
            try:
                self._wire.send((*answer, text))
            except (TypeError, ValueError, RecursionError) as error:
                self._wire.send(("raised", TypeError, (str(error),), {}, text))

    def call_test(self, key: int, positional: Any, named: Any) -> Any:
        """Calls a function of the tests."""
        self._wire.send(("call", key, positional, named))
        return self.serve()

    def _do(self, operation: str, given: list[Any]) -> tuple[Any, Any]:
        """The value, and changed arguments by position or name."""
        if operation == "start":
            self._start(given[0])
            return None, {}
        if operation == "name":
            return self._name(given[0]), {}
        if operation != "call":
            return _OPERATIONS[operation](*given), {}
        function, positional, named = given
        arguments = {**dict(enumerate(positional)), **named}
        before = {key: encoded(value, self) for key, value in arguments.items() if type(value) in _CHANGING}
        value = function(*positional, **named)
        changed = {key: arguments[key] for key, old in before.items() if encoded(arguments[key], self) != old}
        return value, changed

    def _start(self, text: str) -> None:
        module = sys.modules["solution"] = types.ModuleType("solution")
        self._names = module.__dict__
        exec(compile(text, "solution.py", "exec"), self._names)

    def _name(self, name: str) -> tuple[str, Any]:
        """("value", the value) of a global name, or ("shared", its name) in the standard library or a package."""
        value = self._names[name]
        if isinstance(value, types.ModuleType):
            return "shared", value.__name__
        module = str(getattr(value, "__module__", "")).lstrip("_")
        if module in SHARED and getattr(value, "__name__", None) == name:
            return "shared", f"{module}.{name}"
        return "value", value


class _Function:
    """A function of the tests."""

    def __init__(self, key: int, solution: Solution) -> None:
        self.key, self._solution = key, solution

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._solution.call_test(self.key, positional, named)


def _base(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def main() -> None:
    """Entry point: requests from standard input, answers to standard output."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    Solution(reading, writing).serve()
