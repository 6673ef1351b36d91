"""CPU seconds of all processes are counted, each in the function in which it took them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.slurm.possible import why_not
from tests.tiers.imports import ROOT
from tests.tiers.meter import Meter, fixed_work

BURN = """
import time
def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds: pass
"""
# Orphans of another session: one that ended, and one that still runs.
DAEMONS = """
import os, time
from pathlib import Path
def start(folder):
    for number in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            burn(0.4)
            Path(folder, str(number)).touch()
            time.sleep(60 * number)
            os._exit(0)
        os.wait()
    while len(os.listdir(folder)) < 2: time.sleep(0.01)
"""
CONFTEST = """
from tests.tiers import plugin
def pytest_configure(config): config.pluginmanager.register(plugin.Tiers(config), "tiers")
def pytest_addoption(parser): plugin.add_options(parser)
"""


def cpu_seconds(folder: Path, module: str) -> dict[str, float]:
    """CPU seconds by test of a module in a run of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_module.py").write_text(BURN + textwrap.dedent(module))
    options = ["-p", "no:cacheprovider", "--without-budgets", f"--write-durations={folder}/out.json"]
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--rootdir={folder}", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = json.loads((folder / "out.json").read_text())["rows"]
    return {function.partition("::")[2]: cpu for _, function, _, _, _, cpu in rows}


@pytest.mark.heavy
def test_ended_and_running_daemons_count_where_they_took_their_time(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    found = cpu_seconds(
        tmp_path,
        f"""{DAEMONS}
def test_nothing(): pass
def test_daemons(): start({str(tmp_path / "done")!r})
def test_own(): burn(0.3)
def test_nothing_again(): pass
""",
    )
    assert 0.8 <= found["test_daemons"] < 1.6
    assert 0.3 <= found["test_own"] < 0.6
    assert max(found["test_nothing"], found["test_nothing_again"]) < 0.1


@pytest.mark.ranks
def test_forks_of_warm_processes_count_but_not_what_those_import(tmp_path: Path) -> None:
    found = cpu_seconds(
        tmp_path,
        """
        import timeit
        import pytest
        from tests.helpers.distributed import run_ranks

        @pytest.mark.ranks
        def test_nothing(): pass

        @pytest.mark.ranks
        def test_ranks(): run_ranks(timeit.timeit, 2, "sum(range(10**5))", "pass", timeit.default_timer, 1000)
        """,
    )
    assert found["test_nothing"] < 0.2
    assert 1.0 < found["test_ranks"] < 20.0


@pytest.mark.slurm
def test_jobs_of_other_users_count() -> None:
    if why_not():
        pytest.skip(why_not())
    script = f"""
from tests.slurm.cluster import Cluster
from tests.slurm.settings import Settings
from tests.tiers.meter import Meter
meter = Meter()
with Cluster.up(Settings(nodes=1)) as cluster:
    before = meter.seconds()
    cluster.run(["srun", "{sys.executable}", "-c", {(BURN + "burn(1.0)")!r}], user="alice", check=True)
    print(meter.seconds() - before)
meter.close()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 1.0 <= float(done.stdout) < 5.0


@pytest.mark.parametrize("mounts", ["", "30 23 0:26 / /proc/sys rw - cgroup2 cgroup2 rw\n"], ids=["none", "refused"])
def test_where_no_group_can_be_made_nothing_is_measured(tmp_path: Path, mounts: str) -> None:
    (tmp_path / "mountinfo").write_text(mounts)
    assert Meter(tmp_path / "mountinfo").seconds() is None


@pytest.mark.heavy
def test_the_fixed_work_takes_about_a_second() -> None:
    assert 0.2 < fixed_work() < 5
