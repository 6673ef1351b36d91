"""What a plain job is, against what the configuration says."""

from __future__ import annotations

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.direct import JobShape, overrides_from_job
from tests.helpers.plain_model import write_inputs

EIGHT = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_CPUS_PER_TASK": "12",
    "SLURM_GPUS_PER_NODE": "h100:8",
}


def groups(*jobs: dict[str, str]) -> dict[str, str]:
    """The environment of a heterogeneous job."""
    named = {f"{name}_HET_GROUP_{number}": value for number, job in enumerate(jobs) for name, value in job.items()}
    return {"SLURM_HET_SIZE": str(len(jobs)), "SLURM_JOB_NUM_NODES": "1", **named}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (EIGHT, JobShape(2, 8, 12, 8)),
        ({"SLURM_JOB_NUM_NODES": "3"}, JobShape(3, None, None, None)),
        ({**EIGHT, "SLURM_GPUS_PER_NODE": "0"}, JobShape(2, 8, 12, 0)),
        ({**EIGHT, "SLURM_GPUS_PER_NODE": "h100:2,a100:2"}, JobShape(2, 8, 12, 4)),
        (groups(EIGHT, {**EIGHT, "SLURM_CPUS_PER_TASK": "6"}), JobShape(4, 8, 6, 8)),
        (groups(EIGHT, {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8"}), JobShape(3, 8, None, None)),
    ],
)
def test_the_job_as_slurm_says(environ, expected) -> None:
    assert JobShape.from_environ(environ) == expected


def test_groups_with_unlike_ranks_are_refused() -> None:
    with pytest.raises(UserError, match=r"^--ntasks-per-node: 8 and 4 in this job's 2 groups; give every group"):
        JobShape.from_environ(groups(EIGHT, {**EIGHT, "SLURM_NTASKS_PER_NODE": "4"}))


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        (
            [],
            ["slurm.nodes=2", "resources.ranks_per_node=8", "slurm.cpus_per_rank=12", "slurm.gpus_per_node=8"],
        ),
        (["slurm.nodes=2", "resources.ranks_per_node=8", "slurm.cpus_per_rank=12", "slurm.gpus_per_node=8"], []),
        (
            ["slurm.nodes=[1, 4]", "slurm.cpus_per_rank=4", "slurm.gpus_per_node=0"],
            ["resources.ranks_per_node=8"],
        ),
    ],
)
def test_the_job_says_what_the_config_leaves_open(tmp_path, keys, taken) -> None:
    config = load_config(write_inputs(tmp_path), keys)
    assert overrides_from_job(config, JobShape(2, 8, 12, 8)) == taken


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "slurm.nodes=4",
            "slurm.nodes: 4 in the configuration, but the job has 2; submit with --nodes=4, or add slurm",
        ),
        ("slurm.nodes=[3, 4]", "slurm.nodes: 3-4 in the configuration, but the job has 2; submit with --nodes=3-4, or"),
        (
            "resources.ranks_per_node=4",
            "resources.ranks_per_node: 4 in the configuration, but the job has 8; submit with --ntasks-per-node=4, or "
            "add resources.ranks_per_node=8",
        ),
        ("slurm.cpus_per_rank=16", "slurm.cpus_per_rank: 16 in the configuration, but the job has 12; submit with"),
        ("slurm.gpus_per_node=9", "slurm.gpus_per_node: 9 in the configuration, but the job has 8; submit with --gpus"),
    ],
)
def test_a_contradiction_is_reported(tmp_path, key, message) -> None:
    config = load_config(write_inputs(tmp_path), [key])
    with pytest.raises(UserError) as error:
        overrides_from_job(config, JobShape(2, 8, 12, 8))
    assert str(error.value).startswith(message)


def test_ranks_do_not_share_gpus(tmp_path) -> None:
    config = load_config(write_inputs(tmp_path))
    with pytest.raises(UserError, match=r"^--gpus-per-node: the job has 4 on each node for 8 ranks; submit with --gpu"):
        overrides_from_job(config, JobShape(1, 8, None, 4))


def test_the_job_takes_precedence_over_a_site_file(tmp_path) -> None:
    keys = ["slurm.nodes=2", "resources.ranks_per_node=8", "slurm.cpus_per_rank=16", "slurm.gpus_per_node=8"]
    config, job = load_config(write_inputs(tmp_path), keys), JobShape(2, 8, 12, 8)
    assert overrides_from_job(config, job, {"slurm.cpus_per_rank", "slurm.account"}) == ["slurm.cpus_per_rank=12"]
    with pytest.raises(UserError, match=r"slurm\.cpus_per_rank: 16 in the configuration, but the job has 12"):
        overrides_from_job(config, job)
