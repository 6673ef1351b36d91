"""Clusters for tests. Where there can be none, the tests skip, and the end of the run says so in red."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_driver import build_driver
from tests.slurm.cluster import Cluster
from tests.slurm.front import Front
from tests.slurm.possible import why_no_accounting, why_not
from tests.slurm.settings import Settings

SKIPPED = "no test cluster: "


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skip unless a cluster can be brought up here. For tests that make their own."""
    if reason := why_not():
        pytest.skip(SKIPPED + reason)


@pytest.fixture(scope="session")
def shared_cluster(slurm: None) -> Iterator[Cluster]:
    """Four nodes, for the whole run of the tests."""
    with Cluster.up(Settings(nodes=4)) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """Four idle nodes. What a test broke is repaired after it, and its jobs are cancelled."""
    yield shared_cluster
    shared_cluster.heal()


@pytest.fixture
def front(cluster: Cluster, tmp_path: Path) -> Front:
    """The command line on that cluster's login machine, with a small run."""
    return Front(cluster, tmp_path)


@pytest.fixture(scope="session")
def accounted_cluster() -> Iterator[Cluster]:
    """Two nodes and an accounting database. Its users have the account ``project``. Not repaired after a test."""
    if reason := why_no_accounting():
        pytest.skip(SKIPPED + reason)
    with Cluster.up(Settings(nodes=2, accounting=True)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a library that ranks on these nodes take for CUDA's driver: LD_LIBRARY_PATH, with FAKE_GPUS."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, show what the daemons of its cluster said."""
    report = yield
    clusters = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Cluster)]
    if report.failed and clusters:
        report.sections.append(("Slurm's daemons", clusters[0].log_tail()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])]
    ours = [reason.split(SKIPPED)[1] for reason in reasons if SKIPPED in reason]
    for reason in sorted(set(ours)):
        line = f"TESTS ON A REAL SLURM DID NOT RUN ({ours.count(reason)}): {reason}"
        terminalreporter.write_sep("!", line, red=True, bold=True)
