"""A run on two nodes, with another user's program on each that poses as every rank."""

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.strangers import SETTINGS, run_beside, undisturbed

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3000)]


_MOST_RUNS = 5  # a port of the ranks is open for milliseconds: on a busy machine a run may meet no stranger


def test_a_run_beside_strangers_is_bit_equal_or_ends_with_their_address(slurm, tmp_path):
    met = 0
    with Cluster.up(SETTINGS) as cluster:
        reference = undisturbed(cluster, tmp_path / "alone")
        for number in range(_MOST_RUNS):
            found = run_beside(cluster, tmp_path / f"beside-{number}", reference)
            assert found.wrong == ""
            met += found.met
            if met:
                break
    assert met > 0
