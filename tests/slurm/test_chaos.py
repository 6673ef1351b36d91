"""A short form of `make chaos`: the trainer itself, hit by faults, ends with the weights of an undisturbed run."""

import json
import random

import pytest

from tests.slurm import faulty_disk
from tests.slurm.chaos import PLACEMENTS, RL_STEPS, disturbed, undisturbed
from tests.slurm.cluster import Cluster
from tests.slurm.faults import FAULTS
from tests.slurm.faulty_disk import FaultyDisk

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(2400)]


def test_disturbed_runs_end_with_the_weights_of_an_undisturbed_one(cluster, tmp_path):
    reference = undisturbed(cluster, tmp_path / "reference", 2)
    for fault in ("kill_rank", "crash_node"):
        outcome = disturbed(cluster, tmp_path / fault, reference, 2, fault, random.Random(fault))
        assert not outcome.wrong, outcome
        assert outcome.starts > 1, outcome
        cluster.heal()


def test_a_killed_trainer_or_engine_changes_no_bit_of_a_separate_run(cluster, tmp_path):
    """Three ranks of two nodes train, the last one generates."""
    separate = PLACEMENTS["separate"]
    reference = undisturbed(cluster, tmp_path / "reference", 2, **separate)
    for number in range(2):
        outcome = disturbed(
            cluster, tmp_path / f"run-{number}", reference, 2, "kill_rank", random.Random(number), **separate
        )
        assert not outcome.wrong, outcome
        assert outcome.starts > 1, outcome
    records = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    staleness = [record["sampling/staleness_max"] for record in records if "sampling/staleness_max" in record]
    assert len(staleness) == RL_STEPS
    assert max(staleness) == 1


def test_a_killed_rank_changes_no_bit_with_fsdp(cluster, tmp_path):
    """Two ranks shard the model over two nodes; weights, moments and steps are those of an undisturbed run."""
    changes = {"train__backend": "fsdp", "sft__steps": 4, "train__steps": 8, "checkpoint__every": 3}
    reference = undisturbed(cluster, tmp_path / "reference", 2, **changes)
    outcome = disturbed(cluster, tmp_path / "killed", reference, 2, "kill_rank", random.Random(3), **changes)
    assert not outcome.wrong, outcome
    assert outcome.starts > 1, outcome
    assert len(list(max((reference / "checkpoints").glob("step-*")).glob("actor/*.distcp"))) == 2


@pytest.mark.skipif(not faulty_disk.possible(), reason="needs root and FUSE")
def test_a_file_system_whose_fsyncs_fail_changes_no_bit(slurm, tmp_path):
    changes = {"sft__steps": 4, "train__steps": 8, "checkpoint__every": 3}
    disk = FaultyDisk(tmp_path / "files", tmp_path / "disturbed")
    try:
        with Cluster.up(FAULTS["fsync"].cluster_settings(2)) as cluster:
            reference = undisturbed(cluster, tmp_path / "reference", 2, **changes)
            folder, chance = tmp_path / "disturbed", random.Random(1)
            outcome = disturbed(cluster, folder, reference, 2, "fsync", chance, disk, **changes)
    finally:
        disk.close()
    assert not outcome.wrong, outcome
