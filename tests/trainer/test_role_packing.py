"""A role's plans follow what its ranks wait for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.data.packing import sample_costs
from rlhpc.models import read_model
from rlhpc.models.flops import forward_terms
from rlhpc.sharding.layout import MICROBATCH_TOKENS, ParallelLayout
from rlhpc.trainer.roles import Role
from tests.helpers.balance_table import CAPACITY, drawn
from tests.helpers.plain_model import write_model


@dataclass
class Model:
    shape: Any
    layout: ParallelLayout
    meets_in_microbatches: bool = False


@pytest.mark.parametrize("meets", [False, True])
def test_ranks_that_meet_in_microbatches_get_rows(tmp_path: Path, meets: bool) -> None:
    shape, lengths = read_model(write_model(tmp_path)), drawn(64, 1.0, 0)
    role = Role(Model(shape, ParallelLayout(world_size=4), meets), 0, CAPACITY, CAPACITY)  # type: ignore[arg-type]
    (plan,) = role.pack(lengths)
    costs = sample_costs(lengths, *forward_terms(shape))
    sums = [[sum(costs[i] for i in members) for members in rank] for rank in plan.bins]
    wait = sum(map(max, zip(*sums, strict=True))) / max(map(sum, sums))
    assert (wait < 1.001) == meets


def test_pipelines_get_more_microbatches_than_tokens_need(tmp_path: Path) -> None:
    shape, lengths = read_model(write_model(tmp_path)), drawn(128, 0.4, 0)
    counts = []
    for layout in (ParallelLayout(1), ParallelLayout(4, pp=4), ParallelLayout(16, pp=4, tp=4)):
        role = Role(Model(shape, layout), 0, CAPACITY, CAPACITY)  # type: ignore[arg-type]
        counts.append(len(role.pack(lengths)[0].bins[0]))
    assert counts[0] == -(-sum(lengths) // CAPACITY)
    assert counts[0] < counts[2] < counts[1], f"{MICROBATCH_TOKENS} tokens of each of tp ranks"
