"""A short form of `make chaos`: the trainer itself, hit by faults, ends with the weights of an undisturbed run."""

from __future__ import annotations

import random

import pytest

from tests.slurm.chaos import disturbed, undisturbed

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(2400)]


def test_disturbed_runs_end_with_the_weights_of_an_undisturbed_one(cluster, tmp_path):
    reference = undisturbed(cluster, tmp_path / "reference", 2)
    for fault in ("kill_rank", "crash_node"):
        outcome = disturbed(cluster, tmp_path / fault, reference, 2, fault, random.Random(fault))
        assert not outcome.wrong, outcome
        assert outcome.starts > 1, outcome
        cluster.heal()
