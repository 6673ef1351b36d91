"""For how long engines of rollout jobs were not there, by a clock in hand."""

from __future__ import annotations

from rlhpc.trainer.absences import Absences


def test_each_absent_engine_counts_until_it_is_there() -> None:
    absences = Absences(range(1, 3), 100.0)
    absences.look({0}, 104.0)
    absences.look({0, 2}, 106.0)
    assert absences.take() == 2 * 4 + 2
    absences.look({0, 1, 2}, 200.0)
    assert absences.take() == 0


def test_engines_of_the_trainers_job_are_never_absent() -> None:
    absences = Absences(range(2, 2), 0.0)
    absences.look({}, 9.0)
    assert absences.take() == 0
