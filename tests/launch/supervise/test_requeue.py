"""A requeue whose command is killed before it has Slurm's answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.launch.supervise.batch_job import BatchJob

SCONTROL = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
requeue)
    [ "$(grep -c requeue {calls})" = 1 ] && kill -TERM $$
    echo "Job is pending execution for job 7" >&2
    exit 1 ;;
esac
"""


def test_nodes_are_excluded_also_if_the_command_is_killed_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals all processes of the job that it requeues."""
    calls = tmp_path / "calls"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL.format(calls=calls))
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert BatchJob("7", "7", 0, (("node1",),)).requeue(["node2"])
    assert calls.read_text().splitlines() == ["requeue 7", "requeue 7", "update JobId=7 ExcNodeList=node2"]
