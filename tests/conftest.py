"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept-golden", action="store_true", help="write what tests compute into tests/golden instead of comparing"
    )


@pytest.fixture
def accept_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--accept-golden"))
