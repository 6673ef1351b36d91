"""Hostile programs of every class are contained, as a user and as root, in both isolations."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.rewards.hostile.catalogue import CLASSES
from tests.rewards.hostile.program import Program, Response
from tests.rewards.hostile.suite import SETTINGS, Setting, Suite, suite
from tests.rewards.users import needs_python, needs_root

pytestmark = [needs_root, needs_python, pytest.mark.workers]

# Need a sandbox of their own, and were not contained at first.
_QUICK = {
    "closed outer folder",
    "kill the parents",
    "signal that its parent handles",
    "16 MiB of short lines",
    "limits of the parents",
    "CPU time of the parents",
    "priority of the session",
    "pages held by pipes",
    *(program.name for program in CLASSES["space beyond its folder"]),
}
_FILTER = Setting("user", "filter")


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def running(request: pytest.FixtureRequest) -> Iterator[Suite]:
    with suite(request.param) as found:
        yield found


def promised(running: Suite) -> list[Program | Response]:
    return [p for programs in CLASSES.values() for p in programs if running.setting.promises(p)]


def test_the_catalogue_has_each_program_once():
    names = [program.name for programs in CLASSES.values() for program in programs]
    assert len(names) == len(set(names)) >= 120


def test_programs_that_only_try_are_contained(running):
    """All of them in one sandbox, which none of them ends."""
    assert not running.harm_together([p for p in promised(running) if isinstance(p, Program) and not p.alone])


def test_programs_that_were_not_contained_at_first_are_contained(running):
    found = {p.name: running.harm(p) for p in promised(running) if p.name in _QUICK}
    assert not {name: harm for name, harm in found.items() if harm}


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_every_program_of_a_class_is_contained(running, name: str):
    """Each in a sandbox of its own."""
    found = {p.name: running.harm(p) for p in CLASSES[name] if running.setting.promises(p)}
    assert not {name: harm for name, harm in found.items() if harm}


def test_responses_that_solve_their_task_are_worth_something(running):
    """With the limits of those that must not be."""
    solved = Response("solved", "def add(x, y): return x + y", ["assert add(1, 2) == 3"])
    assert running.harm(solved) == ["its score is 1.0"]


_HARM = {
    "it read a secret of a file": "print(open(HOME + '/secret').read())",
    "files changed": "os.unlink(HOME + '/secret')",
    "left changed": "open(f'/dev/shm/hostile-{CANARY}', 'w')",
    "ESCAPED": "forbidden(lambda: os.listdir(HOME))",
    "it did not finish": "raise SystemExit",
}


def test_harm_is_seen():
    """Done by programs where it is not denied, and by this test."""
    with suite(_FILTER) as running:
        for kind, text in _HARM.items():
            harm = running.harm(Program("hostile", text))
            assert any(line.startswith(kind) for line in harm), (kind, harm)
        canary, names = running.around.canary.pid, running.around.names
        before = running.around.state(running.process.pid)
        os.setpriority(os.PRIO_PROCESS, canary, 7)
        socket.create_connection(names["TCP"]).send(names["MARK"])
        user = running.around.user
        left = subprocess.Popen(["sleep", "1000"], user=user, group=user, extra_groups=[])
        try:
            after = running.around.state(running.process.pid)
            assert {key for key in before if before[key] != after[key]} == {"canary", "connections"}
            assert running.around.strangers(running.process.pid) == {left.pid}
        finally:
            left.kill()
            left.wait()
