from __future__ import annotations

import pytest

from tests.cuda_sources.releases import cached


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a release run for those of ``--vllm-releases``; by default for one whose sources are in the cache."""
    if "release" in metafunc.fixturenames:
        given = metafunc.config.getoption("--vllm-releases")
        releases = given.split(",") if given else cached()[:1]
        metafunc.parametrize("release", releases, scope="session")
