"""For which engines the trainers wait, and for how long, by a clock in hand."""

from __future__ import annotations

from rlhpc.trainer.laggards import Laggards


def test_an_engine_is_late_after_its_limit_in_one_step() -> None:
    laggards = Laggards(2.5)
    assert [laggards.look({1}, {0, 1, 2}, float(second)) for second in range(5)] == [[], [], [], [1], [1]]
    laggards.begin_step()
    assert laggards.look({1}, {0, 1, 2}, 9.0) == []
    assert laggards.take() == (1, 4.0)
    assert laggards.take() is None


def test_nobody_is_late_if_all_hold_a_step_up() -> None:
    laggards = Laggards(0.5)
    assert [laggards.look({0, 1}, {0, 1}, float(second)) for second in range(4)] == [[]] * 4
    assert laggards.take() is None


def test_an_engine_that_is_back_counts_from_the_beginning() -> None:
    laggards = Laggards(1.5)
    assert [laggards.look({1}, {0, 1}, float(second)) for second in range(3)] == [[], [], [1]]
    laggards.forget(1)
    assert laggards.look({1}, {0, 1}, 3.0) == []


def test_time_in_which_nobody_looked_counts_little() -> None:
    laggards = Laggards(None)
    laggards.look({1}, {0, 1}, 0.0)
    laggards.look({1}, {0, 1}, 1000.0)
    assert laggards.take() == (1, 1.0)
