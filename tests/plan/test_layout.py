"""ParallelLayout against Megatron's own RankGenerator, and what it refuses."""

from __future__ import annotations

import itertools

import pytest

from rlhpc.core.errors import UserError
from rlhpc.plan.layout import ParallelLayout

SIZES = (1, 2, 3, 4)


def _layouts() -> list[ParallelLayout]:
    layouts = []
    for tp, cp, pp, dp, ep, etp in itertools.product(SIZES, (1, 2), (1, 2, 3), SIZES, (1, 2, 4), (1, 2)):
        world_size = tp * cp * pp * dp
        if world_size % (etp * ep * pp) == 0:
            layouts.append(ParallelLayout(world_size, tp, pp, cp, ep, etp))
    return layouts


def test_groups_equal_megatrons_over_hundreds_of_layouts() -> None:
    from megatron.core.parallel_state import RankGenerator

    layouts = _layouts()
    assert len(layouts) > 400
    for layout in layouts:
        dense = RankGenerator(layout.tp, 1, layout.dp, layout.pp, layout.cp, "tp-cp-ep-dp-pp")
        for axes in ("tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp", "tp-dp-cp", "tp-dp"):
            assert layout.groups(*axes.split("-")) == dense.get_ranks(axes), (layout, axes)
        expert = RankGenerator(layout.etp, layout.ep, layout.edp, layout.pp, 1, "tp-cp-ep-dp-pp")
        for ours, axes in (("ep", "ep"), ("etp", "tp"), ("edp", "dp"), ("etp-ep", "tp-ep"), ("etp-ep-pp", "tp-ep-pp")):
            assert layout.groups(*ours.split("-")) == expert.get_ranks(axes), (layout, ours)


def test_coordinates_name_every_rank_once() -> None:
    for layout in _layouts()[::7]:
        for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
            coords = {tuple(layout.coord(rank)[axis] for axis in axes) for rank in range(layout.world_size)}
            assert len(coords) == layout.world_size


def test_group_of_contains_the_rank_and_differs_only_along_the_axes() -> None:
    layout = ParallelLayout(24, tp=2, pp=3, cp=2)
    for rank in range(24):
        group = layout.group_of(rank, "tp", "pp")
        assert rank in group
        assert len(group) == 6
        assert {layout.coord(r)["cp"] for r in group} == {layout.coord(rank)["cp"]}
        assert {layout.coord(r)["dp"] for r in group} == {layout.coord(rank)["dp"]}


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"parallel: tp 3 x cp 1 x pp 2 = 6 ranks does not divide the 8 ranks"):
        ParallelLayout(8, tp=3, pp=2)
    with pytest.raises(UserError, match=r"etp 1 x ep 3 x pp 1 = 3 ranks does not divide"):
        ParallelLayout(8, ep=3)
