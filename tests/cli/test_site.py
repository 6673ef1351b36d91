"""What commands show of the site file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.core import env
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "site.yaml"
    file.write_text("slurm: {account: physics, partition: gpu}\nefficiency: {compute: 0.4}\n")
    monkeypatch.setenv(env.RLHPC_SITE, str(file))
    return file


GPUS = "slurm.gpus_per_node=8"


def lines(*arguments: str) -> list[str]:
    done = invoke(*arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout.splitlines()


def test_a_dry_run_shows_what_comes_from_the_site_file(tmp_path: Path, site: Path) -> None:
    shown = lines("submit", str(write_inputs(tmp_path)), "--dry-run", "slurm.partition=test", GPUS)
    assert "#SBATCH --account=physics" in shown
    assert "#SBATCH --partition=test" in shown
    assert shown[-1] == f"# from site file {site}: slurm.account, site.efficiency"


def test_a_dry_run_without_a_site_file_says_nothing_of_it(tmp_path: Path) -> None:
    assert not [line for line in lines("submit", str(write_inputs(tmp_path)), "--dry-run", GPUS) if "site file" in line]


def test_a_check_shows_it_too(tmp_path: Path, site: Path) -> None:
    shown = lines("run", str(write_inputs(tmp_path)), "--check")
    assert f"site    {site}: slurm.account, slurm.partition, site.efficiency" in shown
