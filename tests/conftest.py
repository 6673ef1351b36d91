"""Options and markers of the whole test suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rlhpc.core import env
from rlhpc.launch.supervise.job_store import StoreServer
from tests.helpers import session
from tests.tiers.plugin import Tiers, add_options


def pytest_configure(config: pytest.Config) -> None:
    """Give what the tests start the usual surroundings.

    Compiled modules are kept, though a container may forbid it: hundreds of ranks would compile rlhpc each for itself.
    A suite in the background of a script is born deaf to Ctrl-C, and so would be what its tests interrupt.
    """
    config.pluginmanager.register(Tiers(config), "tiers")
    session.all_fresh = config.getoption("--fresh-processes")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ[env.RLHPC_SITE] = ""  # not this user's own
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    parser.addoption(
        "--accept-golden", action="store_true", help="write what tests compute into tests/golden instead of comparing"
    )
    parser.addoption(
        "--fresh-processes",
        action="store_true",
        help="start every process afresh, none forked from one that has imported PyTorch and vLLM (slower)",
    )


@pytest.fixture
def accept_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--accept-golden"))


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """The store of a job on this machine."""
    opened = StoreServer.open(host="127.0.0.1")
    yield opened
    opened.close()
