"""ParallelLayout against Megatron's own RankGenerator and layer placement, refusals, and the exchange for attention."""

from __future__ import annotations

import itertools

import pytest

from rlhpc.config.training import ParallelSection
from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import ParallelLayout, choose_context_method, make_layout
from tests.helpers.coverage import groups_of

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
            assert groups_of(layout, *axes.split("-")) == dense.get_ranks(axes), (layout, axes)
        expert = RankGenerator(layout.etp, layout.ep, layout.edp, layout.pp, 1, "tp-cp-ep-dp-pp")
        for ours, axes in (("ep", "ep"), ("etp", "tp"), ("edp", "dp"), ("etp-ep", "tp-ep"), ("etp-ep-pp", "tp-ep-pp")):
            assert groups_of(layout, *ours.split("-")) == expert.get_ranks(axes), (layout, ours)


def test_coordinates_name_every_rank_once() -> None:
    for layout in _layouts()[::7]:
        for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
            coords = {tuple(layout.coord(rank)[axis] for axis in axes) for rank in range(layout.world_size)}
            assert len(coords) == layout.world_size


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"actor.parallel: tp 3 x cp 1 x pp 2 = 6 ranks does not divide the 8 ranks"):
        ParallelLayout(8, tp=3, pp=2)
    with pytest.raises(UserError, match=r"etp 1 x ep 3 x pp 1 = 3 ranks does not divide"):
        ParallelLayout(8, ep=3)


def _megatron_places(layout: ParallelLayout, layers: int) -> list[tuple[int, int, int]]:
    """Where Megatron's own functions put each layer; an error when they refuse or leave a stage without layers."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        pipeline_dtype=torch.float32,
    )
    places = {}
    for stage, chunk in itertools.product(range(layout.pp), range(layout.vpp or 1)):
        vp_stage = chunk if layout.vpp else None
        offset = get_transformer_layer_offset(config, vp_stage, stage)
        for local in range(get_num_layers_to_build(config, vp_stage, stage)):
            places[offset + local] = (stage, chunk, local)
    assert sorted(places) == list(range(layers))
    assert {stage for stage, _, _ in places.values()} == set(range(layout.pp))
    return [places[layer] for layer in range(layers)]


def test_layers_lie_where_megatron_builds_them() -> None:
    """Over every combination of even and uneven stages: the same layers in each chunk, or refused by both."""
    agreed = uneven = refused = 0
    ends = (None, 1, 2, 4)
    for layers, pp, vpp, first, last in itertools.product((4, 7, 8, 12, 14, 16), (2, 3, 4), (None, 2, 3), ends, ends):
        layout = ParallelLayout(pp, pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        try:
            ours = layout.layer_places(layers)
        except UserError:
            refused += 1
            with pytest.raises((ValueError, AssertionError, ZeroDivisionError)):
                _megatron_places(layout, layers)
            continue
        assert ours == _megatron_places(layout, layers), layout
        agreed += 1
        uneven += first is not None or last is not None
    assert min(agreed - 100, uneven - 60, refused - 100) > 0


def test_layers_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"actor.parallel.pp: 7 layers do not divide into 2 pipeline stages; set actor.parallel.fir"
    ):
        ParallelLayout(2, pp=2).layer_places(7)
    with pytest.raises(
        UserError, match=r"actor.parallel.pp: 6 of the 8 layers do not divide into 4 other pipeline stages"
    ):
        ParallelLayout(5, pp=5, first_stage_layers=2).layer_places(8)
    with pytest.raises(
        UserError, match=r"actor.parallel.pp: 0 of the 4 layers do not divide into 1 other pipeline stages"
    ):
        ParallelLayout(3, pp=3, first_stage_layers=2, last_stage_layers=2).layer_places(4)
    with pytest.raises(
        UserError,
        match=r"actor.parallel.last_stage_layers: with two pipeline ranks and virtual stages, .*; leave it out",
    ):
        ParallelLayout(2, pp=2, vpp=2, first_stage_layers=2, last_stage_layers=2).layer_places(4)
    with pytest.raises(
        UserError, match=r"actor.parallel.vpp: the 3 layers of a pipeline stage do not divide into 2 virtual"
    ):
        ParallelLayout(2, pp=2, vpp=2, last_stage_layers=3).layer_places(7)


def test_the_layout_of_a_configuration() -> None:
    section = ParallelSection(tp=2, pp=2, cp=2, ep=4, etp=1, vpp=1, first_stage_layers=3)
    layout = make_layout(section, 16)
    assert layout == ParallelLayout(16, tp=2, pp=2, cp=2, ep=4, first_stage_layers=3)
    assert layout.text == "tp 2 x pp 2 (first stage of 3) x cp 2 x dp 2, experts ep 4 x dp 2"
    assert make_layout(ParallelSection(), 4).text == "tp 1 x dp 4"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "method", "reason"),
    [
        (32, 8, 4, "ulysses", "each of 4 ranks takes 8 of 32 query heads"),
        (32, 2, 8, "ulysses", "each of 2 key-value heads is copied 4 times to divide them"),
        (12, 3, 2, "ulysses", "each of 3 key-value heads is copied 2 times to divide them"),
        (14, 2, 4, "all_gather", "14 query heads cannot be divided among 4 ranks"),
    ],
)
def test_heads_are_divided_where_they_can_be(heads: int, kv_heads: int, cp: int, method: str, reason: str) -> None:
    choice = choose_context_method(heads, kv_heads, cp)
    assert choice.method == method
    assert choice.reason.endswith(reason)


def test_a_request_holds_where_heads_allow_it() -> None:
    assert choose_context_method(32, 8, 4, "all_gather").method == "all_gather"
    assert choose_context_method(32, 8, 4, "ulysses").method == "ulysses"
    assert choose_context_method(14, 2, 4, "ulysses").method == "all_gather"
