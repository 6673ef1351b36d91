"""Options of the whole test suite."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure() -> None:
    """What the tests start finds usual surroundings.

    Compiled modules are kept, though a container may forbid it: hundreds of ranks would compile rlhpc each for itself.
    A suite in the background of a script is born deaf to Ctrl-C, and so would be what its tests interrupt.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept-golden", action="store_true", help="write what tests compute into tests/golden instead of comparing"
    )


@pytest.fixture
def accept_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--accept-golden"))
