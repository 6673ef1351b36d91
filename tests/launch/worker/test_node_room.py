"""Nodes whose last choice for temporary files is too small, or lets nothing be executed."""

from __future__ import annotations

import pytest

from tests.launch.worker.made_nodes import CHECK, needs_root, of_attempt, on_node

SMALL, NOEXEC = "mount -o remount,size=8m /tmp", "mount -o remount,noexec /tmp"
REMEDY = "; set TMPDIR in slurm.environment to a folder of the node that does"


@needs_root
@pytest.mark.parametrize(
    ("given", "before"), [("", ""), ("/tmp/gone", "TMPDIR '/tmp/gone' does not exist, and ")], ids=["unset", "gone"]
)
def test_a_node_whose_tmp_is_too_small_is_at_fault(given, before):
    found = on_node(SMALL, CHECK, TMPDIR=given, SLURM_JOB_ID="77")
    message = f"node localhost: {before}/tmp has only 8 MiB free of the 64 that its ranks need{REMEDY}, or remove files"
    assert found.error.startswith(message)


@needs_root
def test_each_rank_of_the_node_counts():
    found = on_node("mount -o remount,size=100m /tmp", f"{CHECK[:-1]}, ranks_here=2)", SLURM_JOB_ID="77")
    assert "/tmp has only 100 MiB free of the 128 that its ranks need" in found.error
    assert on_node("mount -o remount,size=100m /tmp", CHECK, SLURM_JOB_ID="77").error == ""


@needs_root
@pytest.mark.parametrize("variables", [{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"TORCHDYNAMO_DISABLE": "0"}])
def test_a_tmp_without_execution_is_refused_if_ranks_compile(variables):
    found = on_node(NOEXEC, CHECK, SLURM_JOB_ID="77", **variables)
    expected = "node localhost: /tmp is mounted noexec, so that compiled kernels cannot be loaded" + REMEDY
    assert found.error == f"UserError: {expected}", "the site mounts it so, on every node"


@needs_root
def test_a_tmpdir_without_execution_is_replaced_with_a_warning():
    setup = "mkdir /tmp/data; mount -t tmpfs -o noexec tmpfs /tmp/data"
    found = on_node(setup, CHECK, TMPDIR="/tmp/data", SLURM_JOB_ID="77", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
    assert "TMPDIR '/tmp/data' is mounted noexec, so that compiled kernels cannot be loaded; /tmp/rlhpc-0-77 is" in (
        found.message
    )


@needs_root
def test_ranks_that_compile_nothing_need_no_execution():
    found = on_node(NOEXEC, CHECK, SLURM_JOB_ID="77", TORCHDYNAMO_DISABLE="1")
    assert (found.error, found.message) == ("", "")
    assert found.environ["TMPDIR"] == of_attempt("/tmp/rlhpc-0-77")
