"""How often engines look at the board, which all ranks of the job share."""

from __future__ import annotations

import pytest

from rlhpc.rollout.generator.lead import look_seconds

_READS_A_SECOND = 4000  # that the job's store answers on one core, for 31 keys each


@pytest.mark.parametrize("engines", [1, 4, 32, 96])
@pytest.mark.parametrize("waited", [0.0, 0.1, 100.0])
def test_engines_that_wait_together_leave_the_store_half_of_its_time(engines: int, waited: float) -> None:
    assert engines / look_seconds(engines, waited) <= _READS_A_SECOND / 2


def test_a_few_engines_look_often() -> None:
    assert look_seconds(1, 0.0) == look_seconds(2, 0.0) == 0.001
    assert look_seconds(2, 0.5) == pytest.approx(0.025)
