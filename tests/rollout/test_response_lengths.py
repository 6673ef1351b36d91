"""What later steps know of the lengths of earlier ones."""

from __future__ import annotations

from pathlib import Path

from rlhpc.api import Prompt
from rlhpc.rollout.response_lengths import ResponseLengths
from rlhpc.trainer.carryover import Carryover


def test_the_newest_group_of_a_prompt_counts_over_the_mean_of_its_step() -> None:
    lengths = ResponseLengths()
    lengths.record({})
    assert lengths == ResponseLengths()
    lengths.record({3: [10, 30], 5: [60, 60]})
    assert lengths == ResponseLengths(40.0, {3: 0.5, 5: 1.5})
    lengths.record({5: [10], 7: [30]})
    assert lengths == ResponseLengths(20.0, {3: 0.5, 5: 0.5, 7: 1.5})
    assert lengths.of_groups(20, [4, 7, 5, 7]) == ((21, 1.5), (22, 0.5), (23, 1.5)), "as far as they are known"


def test_they_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    before, after = Carryover(), Carryover()
    before.lengths.record({3: [1, 3], 1 << 40: [7]})
    before.save(tmp_path, rank=1)
    assert not list(tmp_path.iterdir()), "the first rank has them"
    before.save(tmp_path)
    after.load(tmp_path, 9, lambda number: Prompt(number, (), "", "", {}))
    assert after.lengths == before.lengths
    older = Carryover()
    older.load(tmp_path / "none", 9, lambda number: Prompt(number, (), "", "", {}))
    assert older.lengths == ResponseLengths()
