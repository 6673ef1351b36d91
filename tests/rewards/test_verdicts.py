"""Responses that try to pass tests without solving the task, and correct ones whose tests use values of many kinds."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from rlhpc.rewards.code import python
from tests.rewards.users import PYTHON

ASSERTS = ["assert inc(1) == 2", "assert inc(2) == 3"]
CLOSE = ["assert abs(inc(1) - 2) < 1e-6"]
MATHS = ["import math\nassert math.isclose(inc(1), 2)"]
LISTS = ["assert pair(1) == [1, 2]", "assert 2 in pair(1)"]
WRONG = "def inc(x):\n    return 0\n"
ANYTHING = """
class Equal({base}):
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __contains__(self, other): return True
    __rsub__ = __mul__ = __lt__ = __sub__
def inc(x): return Equal()
pair = inc
"""


def anything(base: str = "object") -> str:
    return ANYTHING.format(base=base)


FORGERIES: dict[str, tuple[str, list[str]]] = {
    "token": (
        f"{WRONG}import os, __main__ as m\nos.write(m.answer, (m.given['token'] + ' 2').encode())\nos._exit(0)",
        ASSERTS,
    ),
    "million": (
        f"{WRONG}import os, __main__ as m\nos.write(m.answer, (m.given['token'] + ' 2000000').encode())\nos._exit(0)",
        ASSERTS,
    ),
    "digits": (
        f"{WRONG}import os, __main__ as m\nos.write(m.answer, (m.given['token'] + '9' * 400).encode())\nos._exit(0)",
        ASSERTS,
    ),
    "exec": (f"{WRONG}import builtins\nbuiltins.exec = lambda *given: None", ASSERTS),
    "compile": (
        f"{WRONG}import builtins\nown = compile\nbuiltins.compile = lambda *given: own('', 'x', 'exec')",
        ASSERTS,
    ),
    "frames": (
        f"{WRONG}import sys\nframe = sys._getframe(1)\n"
        "while frame:\n    for value in frame.f_globals.values():\n"
        "        if isinstance(value, dict) and 'tests' in value: value['tests'][:] = ['', '']\n"
        "    frame = frame.f_back",
        ASSERTS,
    ),
    "emptied tests": (f"{WRONG}import __main__\n__main__.given['tests'][:] = ['pass'] * 2", ASSERTS),
    "garbage collector": (
        f"{WRONG}import gc\nfor found in gc.get_objects():\n"
        "    if type(found) is list and found and type(found[0]) is str and found[0].startswith('assert'):\n"
        "        found[:] = ['pass'] * len(found)",
        ASSERTS,
    ),
    "expected values": (
        "import gc, re\nknown = {}\nfor found in gc.get_objects():\n"
        "    if type(found) is list and found and type(found[0]) is str and found[0].startswith('assert'):\n"
        "        for test in found: known[test[11]] = int(test[-1])\n"
        "def inc(x): return known[str(x)]",
        ASSERTS,
    ),
    "equal object": (anything(), ASSERTS),
    "equal number": (anything("int"), ASSERTS),
    "equal list": (anything("list"), LISTS),
    "near object": (anything(), CLOSE),
    "near number": (anything("float"), CLOSE),
    "shadowed abs": (f"{WRONG}abs = lambda x: 0", CLOSE),
    "patched abs": (f"{WRONG}import builtins\nbuiltins.abs = lambda x: 0", CLOSE),
    "patched module": (f"{WRONG}import math\nmath.isclose = lambda *given: True", MATHS),
    "planted module": (
        f"{WRONG}import sys, types\nplanted = types.ModuleType('math')\nplanted.isclose = lambda *given: True\n"
        "sys.modules['math'] = math = planted",
        MATHS,
    ),
    "import": (
        f"{WRONG}import builtins, types\nfake = types.SimpleNamespace(isclose=lambda *given: True)\n"
        "builtins.__import__ = lambda *given, **more: fake",
        MATHS,
    ),
    "counter": (
        f"{WRONG}import sys\nclass Passed(BaseException): pass\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_filename == 'test.py': frame.f_trace_opcodes = True\n"
        "    if frame.f_code.co_filename == 'test.py' and event == 'line': frame.f_globals['inc'] = type('I', (), {\n"
        "        '__call__': lambda self, x: type('E', (), {'__eq__': lambda s, o: True})()})()\n"
        "    return trace\nsys.settrace(trace)",
        ASSERTS,
    ),
    "descriptors": (
        f"{WRONG}import os\nfor descriptor in range(64):\n    try: os.write(descriptor, b'2')\n"
        "    except OSError: pass\nos._exit(0)",
        ASSERTS,
    ),
}


def score(program: str, tests: Any, **arguments: Any) -> float:
    return python("", f"```python\n{program}\n```", tests, {}, seconds=20.0, **arguments)["score"]


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORGERIES)
def test_no_response_forges_its_verdict(name: str):
    program, tests = FORGERIES[name]
    assert score(program, tests, partial=True) == 0


@pytest.mark.heavy
def test_a_verdict_is_not_reached_through_the_connection():
    """Messages that no test asked for, of every kind and none."""
    programs = (
        "import os\nfor descriptor in range(3, 16):\n    try: os.write(descriptor, {sent})\n    except OSError: pass",
        "import __main__\nwire = __import__('sys').modules['rlhpc.rewards.solution_side']\n"
        "wire.Wire.send = lambda self, message: __import__('os').write(self._writing, {sent})\n",
    )
    huge, deep = "(1 << 62).to_bytes(8, 'big')", "(1 << 16).to_bytes(8, 'big') + b'l1;' * (1 << 15)"
    for sent in (huge, deep, "b'2' * 4096", "bytes(4096)", "(8).to_bytes(8, 'big') + b'l99999999;'"):
        for program in programs:
            assert score(WRONG + program.format(sent=sent), ASSERTS, partial=True) == 0


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "AssertionError", "GeneratorExit"])
def test_an_exception_passes_no_test(kind: str):
    assert score(f"def inc(x): raise {kind}(0)", ASSERTS, partial=True) == 0


def test_answers_may_not_name_functions_of_the_tests():
    """A built-in function in an answer would run in the tests' interpreter."""
    program = (
        "import sys\nwire = sys.modules['rlhpc.rewards.wire']\nother = wire._write_other\n"
        "def write(value, parts, references):\n"
        "    if type(value) is object: return wire._write_bytes(b'g', b'exec', parts)\n"
        "    return other(value, parts, references)\n"
        "wire._write_other = write\ndef make(): return object()"
    )
    assert score(program, ["assert make()('pass') is None"], partial=True) == 0


HONEST: dict[str, tuple[str, list[str]]] = {
    "values": (
        "def same(x): return x",
        [
            "for x in (None, True, 1.5, -0.0, float('inf'), 2j, 'ä\\ud800', b'b', [1, (2, {3})], {'a': [1]}, "
            "range(3)):\n"
            "    assert same(x) == x and type(same(x)) is type(x)",
            "assert same(7 ** 9000) == 7 ** 9000 and same(-5) == -5 and same(frozenset('a')) == {'a'}",
            "assert same(x=3) == 3 and same(int) is int and same(...) is ...",
        ],
    ),
    "subclasses": (
        "from collections import *\nimport enum\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
        "P = namedtuple('P', 'x y')\nclass E(enum.IntEnum):\n    A = 4\n"
        "def point(): return P(1, 2)\ndef level(): return E.A\ndef count(text): return Counter(text)\n"
        "def queue(): return deque([1, 2])\ndef half(): return Fraction(1, 2)\ndef tenth(): return Decimal('0.1')\n",
        [
            "assert point() == (1, 2) and level() == 4 and count('aab') == {'a': 2, 'b': 1}",
            "assert queue() == deque([1, 2]) and half() == Fraction(1, 2) and tenth() == Decimal('0.1')",
            "assert count('aab').most_common(1) == [('a', 2)]",
        ],
    ),
    "objects": (
        "class Stack:\n    def __init__(self, *items): self.items = list(items)\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, at): return self.items[at]\n"
        "class Solution:\n    def twice(self, x): return 2 * x",
        [
            "s = Stack(1)\nassert s.push(2) is s\nassert len(s) == 2 and list(s) == [1, 2] and 2 in s and s[0] == 1",
            "assert s.pop() == 2 and s.items == [1] and isinstance(s, Stack) and not isinstance(3, Stack)",
            "assert not Stack() and not hasattr(s, 'other') and vars(s) == {'items': [1]}\ns.items = []\nassert not s",
            "assert Solution().twice(4) == 8 and Stack.__name__ == 'Stack'",
            "import copy\nt = copy.deepcopy(s)\nt.push(1)\nassert len(s) == 0 and len(t) == 1 and t is not s",
        ],
    ),
    "changed arguments": (
        "def turn(x): x.reverse()\ndef put(d, s):\n    d['a'] = 1\n    s.add(2)",
        [
            "a = [3, 1, 2]\nassert turn(a) is None\nassert a == [2, 1, 3]",
            "d, s = {}, set()\nput(d, s=s)\nassert d == {'a': 1} and s == {2}",
        ],
    ),
    "exceptions": (
        "class Empty(LookupError): pass\ndef fail(x):\n    raise (Empty if x else ValueError)('why', x)",
        [
            "try:\n    fail(0)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('why', 0)",
            "try:\n    fail(1)\n    assert False\nexcept Empty as error:\n    assert str(error).startswith('(')",
            "try:\n    fail(1)\n    assert False\nexcept LookupError:\n    pass",
        ],
    ),
    "functions": (
        "def each(f, xs): return [f(x) for x in xs]\ndef adder(n): return lambda x: x + n\n"
        "def evens():\n    n = 0\n    while True:\n        yield n\n        n += 2\n"
        "def safe(f):\n    try:\n        return f()\n    except ZeroDivisionError:\n        return 'zero'\n",
        [
            "assert each(lambda x: x * x, [1, 2]) == [1, 4] and each(str, [1]) == ['1'] and each(abs, [-1]) == [1]",
            "assert adder(2)(3) == 5 and each(adder(1), (1, 2)) == [2, 3] and safe(lambda: 1 / 0) == 'zero'",
            "assert each(lambda x: adder(x)(1), [1]) == [2]",
            "from itertools import islice\nassert list(islice(evens(), 3)) == [0, 2, 4]",
            "g = evens()\nassert next(g) == 0",
        ],
    ),
    "names": (
        "import math\nfrom math import gcd\nimport collections as c\nTOTAL = 0\n"
        "def add(x):\n    global TOTAL\n    TOTAL += x\n    print('added', x)\n    return TOTAL",
        [
            "from solution import add as own\nassert own(1) == 1 and TOTAL == 1 and math.pi > 3 and gcd(4, 6) == 2",
            "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    add(2)\n"
            "assert out.getvalue() == 'added 2\\n'",
            "import solution\nassert solution.TOTAL == 3",
            "def check(candidate):\n    assert candidate(1) == TOTAL\ncheck(add)",
        ],
    ),
    "built-in name": ("def sum(xs): return 'own'", ["assert sum([1]) == 'own'"]),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", HONEST)
def test_tests_of_a_correct_solution_pass(name: str):
    program, tests = HONEST[name]
    assert score(program, tests, partial=True) == 1
    assert score(program, tests, partial=True, in_process=True) == 1


def test_arrays_of_packages_are_values():
    program = "import numpy as np\ndef ones(n): return np.ones(n, dtype='float32')\ndef total(x): return np.sum(x)"
    tests = ["assert np.allclose(ones(2), [1, 1]) and ones(2).dtype == np.float32", "assert total(np.arange(4)) == 6"]
    assert score(program, tests, packages=True, memory_mib=1024) == 1


@pytest.mark.parametrize("result", ["2", "-1", "1000000"])
@pytest.mark.parametrize("in_process", [False, True])
def test_a_score_is_between_zero_and_one(result: str, in_process: bool):
    program = f"import os, sys\nfor descriptor in range(16):\n    try: os.write(descriptor, b'{result}')\n"
    program += "    except OSError: pass\nos._exit(0)"
    assert 0 <= score(program, ASSERTS, partial=True, in_process=in_process) <= 1


@pytest.mark.skipif(not os.path.realpath(PYTHON).endswith(f"3.{sys.version_info[1]}"), reason="another Python")
def test_tests_run_apart_without_namespaces_too(monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() == 0:  # the program is nobody's
        monkeypatch.setattr(sys, "_base_executable", PYTHON)
    assert score("def inc(x): return x + 1", ASSERTS, isolation="filter") == 1
    assert score(anything(), ASSERTS, isolation="filter") == 0
