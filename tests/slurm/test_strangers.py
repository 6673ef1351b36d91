"""A run on two nodes, with another user's program on each that poses as every rank."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.strangers import SETTINGS, run_beside, undisturbed

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3000)]


def test_a_run_beside_strangers_is_bit_equal_or_ends_with_their_address(slurm, tmp_path):
    with Cluster.up(SETTINGS) as cluster:
        found = run_beside(cluster, tmp_path / "beside", undisturbed(cluster, tmp_path / "alone"))
    assert found.wrong == ""
    assert found.connections > 0
    assert found.met > 0
