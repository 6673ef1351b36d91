"""Tests of trackers' libraries run in processes of their own.

The libraries change the process that imports them: W&B replaces ``sys.exit``, and MLflow's OpenTelemetry starts a
thread in every fork, which may then not enter a user namespace.
"""

from __future__ import annotations

import os
import pickle
import traceback

import pytest

MODULES = ("test_libraries", "test_attached", "test_kills")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.module.__name__.rpartition(".")[2] not in MODULES:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            pyfuncitem.obj(**arguments)
            report = b""
        except BaseException as error:
            skipped = isinstance(error, pytest.skip.Exception)
            report = pickle.dumps((skipped, str(error) if skipped else traceback.format_exc()))
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(report)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the test's process ended with {os.waitstatus_to_exitcode(status)}"
    if report:
        skipped, text = pickle.loads(report)
        if skipped:
            pytest.skip(text)
        pytest.fail(text, pytrace=False)
    return True
