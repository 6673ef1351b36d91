"""Whether there is a Slurm to be asked, and what a submission inherits."""

import os

import pytest

from rlhpc.core.errors import UserError
from rlhpc.launch.slurm import commands
from rlhpc.launch.slurm.commands import ask, clean_submission, last_line, private_files, require_controller


def test_a_machine_without_slurm_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no Slurm on this machine: `sbatch` not found; log in to a login node"):
        require_controller()
    with pytest.raises(UserError, match="no Slurm on this machine: `squeue` not found"):
        ask("squeue")


def test_a_command_that_hangs_is_given_up(tmp_path):
    with pytest.raises(UserError, match="did not answer within 0 s; try again later"):
        ask("sleep", "60", seconds=0.2)


def test_users_filters_do_not_reach_the_commands(monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    shown = ask("env").out.splitlines()
    assert "LC_ALL=C" in shown
    assert "SLURM_TIME_FORMAT=standard" in shown
    assert not [line for line in shown if line.startswith("SQUEUE_")]


def test_another_cluster_is_named_to_the_commands_and_the_own_one_is_not(monkeypatch):
    monkeypatch.setattr(commands, "_own", ["here"])
    asked = [ask("echo", "-h", cluster=name).out.strip() for name in (None, "", "here", "there")]
    assert asked == ["-h", "-h", "-h", "-M there -h"]


def test_a_job_asks_its_own_cluster(monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "there")
    assert "SLURM_CLUSTERS=there" in ask("env").out.splitlines()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "SLURM_CLUSTERS=there" not in ask("env").out.splitlines()


def test_a_cluster_of_the_config_counts_more_than_the_shell_s(monkeypatch):
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.setenv(name, "there")
    with clean_submission(frozenset({"clusters"})):
        assert not {"SLURM_CLUSTERS", "SBATCH_CLUSTERS"} & set(os.environ)


def test_the_environment_overrides_no_option_of_the_script(monkeypatch):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SBATCH_OPEN_MODE", "truncate")
    monkeypatch.setenv("SLURM_CLUSTERS", "here")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    before = dict(os.environ)
    with clean_submission(frozenset({"time", "partition"})):
        names = set(os.environ)
    assert not names & {"SBATCH_TIMELIMIT", "SBATCH_PARTITION", "SBATCH_OPEN_MODE"}
    assert not names & {"SBATCH_EXPORT", "SLURM_EXPORT_ENV"}, "the job has the environment that it is submitted with"
    assert names >= {"SBATCH_ACCOUNT", "SLURM_CLUSTERS"}, "what the script leaves open stays the user's"
    assert dict(os.environ) == before


def test_a_job_around_the_submission_leaves_no_traces(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "256")
    monkeypatch.setenv("SLURM_CONF", "/etc/x")
    with clean_submission(frozenset()):
        assert {name for name in os.environ if name.startswith("SLURM_")} == {"SLURM_CONF"}


def test_files_of_a_submission_are_private(tmp_path):
    with private_files():
        (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "b").stat().st_mode & 0o777 != 0o600


@pytest.mark.parametrize(
    ("text", "line"), [("a\nsbatch: error: b\n\n", "b"), ("scontrol: fatal: no\n", "no"), ("", ""), ("x", "x")]
)
def test_the_last_line(text, line):
    assert last_line(text) == line
