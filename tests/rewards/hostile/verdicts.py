"""Responses that try to pass tests without solving their task, beside those of ``test_verdicts``."""

from __future__ import annotations

from tests.rewards.hostile.program import Response

_STREAMS = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
_ASSERTS = ["assert add(1, 2) == 3", "assert add(5, 6) == 11"]
_WRONG = "def add(x, y): return 0\n"
_WRITES = f"""{_WRONG}import os
def write():
    for number in range(3, 9):
        try:
            os.write(number, b"2" * 16)
        except OSError:
            pass
"""
_WIRE = "import os, sys\nwire = sys.modules['rlhpc.rewards.wire']\nside = sys.modules['rlhpc.rewards.solution_side']\n"


def _sends(body: str) -> str:
    """A solution whose answers are the given bytes, once it is called."""
    return (
        f"{_WIRE}own = wire.Wire.send\ncalls = []\ndef send(self, message):\n"
        f"    if not calls: return own(self, message)\n    body = {body}\n"
        "    os.write(self._writing, len(body).to_bytes(8, 'big') + body)\n"
        "wire.Wire.send = send\ndef add(x, y):\n    calls.append(1)\n    return 0\n"
    )


def _answers(value: str) -> str:
    """The body of a message that says that a call has returned the value."""
    return f"b't4;s4;done' + {value} + b'd0;s0;'"


def _writes(value: str) -> str:
    """A solution whose answer of an object is encoded in a given way."""
    return (
        f"{_WIRE}def write(value, parts, references): parts.append({value})\nwire._write_other = write\n"
        "def add(x, y): return object()\n"
    )


_RETURNS = {
    "type that is equal to all": "type('T', (type,), {'__eq__': lambda s, o: True})('C', (), {})",
    "text that is equal to all": "type('S', (str,), {'__eq__': lambda s, o: True})('3')",
    "object that says it is a number": "type('I', (), {'__class__': property(lambda s: int), "
    "'__eq__': lambda s, o: True, '__index__': lambda s: 3, '__int__': lambda s: 3})()",
    "object that pickles to a call": "type('R', (), {'__reduce__': lambda s: (eval, ('3',))})()",
    "code that was marshalled": "__import__('marshal').dumps(compile('3', 'x', 'eval'))",
    "iterator of all numbers": "iter(range(100))",
    "function": "lambda *given: 3",
    "module": "__import__('math')",
    "built-in type": "int",
    "not a number": "float('nan')",
    "list that contains itself": "(lambda x: x.append(x) or x)([])",
    "deep list": "__import__('functools').reduce(lambda x, n: [x], range(10**5), 0)",
    "number of millions of digits": "1 << (1 << 27)",
    "exception": "AssertionError(3)",
    "generator": "(n for n in range(9))",
    "weak reference": "__import__('weakref').ref(int)",
}
_BODIES = {
    "call of a function by name": _answers("b'g4;eval'"),
    "value of a module": _answers("b'vt2;'[:1] + b'2;s9;os.system' + b's4;true'"),
    "exception without a class": "b't5;s6;raisedi0x3;l0;d0;s0;'",
    "exception that ends a process": "b't5;s6;raisedg10;SystemExitl1;i0x0;d0;s0;'",
    "exception that ends a loop": "b't5;s6;raisedg13;StopIterationl0;d0;s0;'",
    "object by a false number": _answers("b'ot2;s3;owni-0x1;'"),
    "object of the tests": _answers("b'ot2;s3;owni0x0;'"),
    "error that is no class": _answers("b'ot4;s5;errori0x0;s1;Es4;eval'"),
    "changed names": "b't4;s4;donei0x0;d1;s3;addl0;s0;'",
    "length below zero": _answers("b's-9;x'"),
    "array of objects": _answers("b'a2;s1;Ol1;i0x3;'"),
    "request of its own": "b't4;s4;calli0x0;t0;d0;'",
    "result of its own": "b't2;s6;resulti0x3;'",
    "nothing": "b''",
    "random bytes": "os.urandom(4096)",
}
_SOLUTIONS = {
    "exit in a call": "import os\ndef add(x, y): os._exit(0)",
    "exit of the interpreter": "import sys\ndef add(x, y): sys.exit(0)",
    "crash in a call": "import ctypes\ndef add(x, y): ctypes.string_at(0)",
    "call that never returns": "import time\ndef add(x, y): time.sleep(1000)",
    "changed assertions": f"{_WRONG}import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {{}})",
    "replaced solution": f"{_WRONG}import sys, types\nsys.modules['solution'] = types.SimpleNamespace(add=3)",
    "hook at the end": f"{_WRONG}import atexit, os\natexit.register(os.write, 2, b'2')",
    "hook of errors": f"{_WRONG}import sys\nsys.excepthook = sys.unraisablehook = lambda *given: None",
    "verdict as errors": f"{_WRONG}import os\nos.write(2, b'2')\nos.write(1, b'2')\nos._exit(0)",
    "thread that answers": f"{_WRITES}import threading\nthreading.Thread(target=write).start()",
    "child that answers": f"{_WRITES}if os.fork() == 0:\n    write()\n    os._exit(0)",
    "names that any module has": "def __getattr__(name): return lambda *given: 3\n__eq__ = lambda *given: True",
    "flood of printed text": "def add(x, y):\n    print('2' * (32 << 20))\n    return 0",
    "limits of its parent": f"{_WRONG}import os, resource\nfor kind in range(16):\n"
    "    try: resource.prlimit(os.getppid() or 1, kind, (0, 0))\n    except OSError: pass\nwhile True: pass",
    "signal that its parent handles": f"{_WRONG}import os, time\nos.kill(os.getppid() or 1, 15)\ntime.sleep(0.1)",
    "end of its parent": f"{_WRONG}import os\nfor n in range(1, 64):\n    try: os.kill(1, n)\n    except OSError: pass",
}
_SUM = "print(sum(map(int, input().split()))"
_PRINTS = {
    "nothing printed": "pass",
    "all numbers": "for n in range(100): print(n)",
    "right output and a failure": f"{_SUM})\nraise SystemExit(1)",
    "right output and a signal": f"import os\n{_SUM}, flush=True)\nos.kill(os.getpid(), 9)",
    "right output as an error": f"import sys\n{_SUM}, file=sys.stderr)",
    "right output before others": f"{_SUM}, 0)",
    "right output of a late child": f"import os, time\nif os.fork() == 0:\n    time.sleep(1)\n    {_SUM})",
    "16 MiB of short lines": "import os\nfor n in range(16): os.write(1, b'ab\\n ' * (1 << 18))\nos._exit(0)",
    "its input": "import sys\nprint(sys.stdin.read())",
    "output and erased output": "import os\nos.write(1, b'3' * 9)\nos.lseek(1, 0, 0)\nos.write(1, b'\\x08' * 9)",
}

VERDICTS = [
    *(Response(name, f"value = {text}\ndef add(x, y): return value", _ASSERTS) for name, text in _RETURNS.items()),
    *(Response(f"message: {name}", _sends(body), _ASSERTS) for name, body in _BODIES.items()),
    Response("answer in the form of code", _writes("b'g4;exec'"), ["assert add(1, 2)('pass') is None"]),
    *(Response(name, text, _ASSERTS) for name, text in _SOLUTIONS.items()),
    *(Response(name, text, _STREAMS, unpromised="") for name, text in _PRINTS.items()),
]
