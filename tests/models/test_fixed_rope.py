"""Fields of a model whose dynamic RoPE is fixed, in files of each age, and what cannot be fixed."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.core.errors import UserError
from rlhpc.models import has_dynamic_rope
from rlhpc.models.rope import fix_fields

FIELDS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 100}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
BASE = 1e4 * (3 * 400 / 100 - 2) ** (16 / 14)  # at 400 tokens, of heads of 16 dimensions
FIXED = {"rope_type": "default", "rope_theta": BASE}


@pytest.mark.parametrize(
    ("rope", "fixed"),
    [
        ({"rope_parameters": {**DYNAMIC, "rope_theta": 1e4}}, {"rope_parameters": FIXED}),
        ({"rope_parameters": DYNAMIC, "rope_theta": 1e4}, {"rope_parameters": FIXED, "rope_theta": BASE}),
        ({"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_theta": 1e4}, {"rope_theta": BASE}),
    ],
)
def test_files_of_each_age_keep_their_form(rope: dict[str, Any], fixed: dict[str, Any]) -> None:
    given = {**FIELDS, **rope}
    found = fix_fields(given, 400)
    assert found == {**FIELDS, **fixed, "max_position_embeddings": 400}
    assert has_dynamic_rope(given)
    assert not has_dynamic_rope(found)
    assert fix_fields(found, 800) == found
    within = fix_fields(given, 100)
    assert (within["max_position_embeddings"], "rope_scaling" in within) == (100, False)
    assert 1e4 in (within.get("rope_theta"), within.get("rope_parameters", {}).get("rope_theta"))


def test_part_of_a_head_is_rotated() -> None:
    partial = {"rope_theta": 1e4 * 10 ** (8 / 6), "rope_type": "default", "partial_rotary_factor": 0.5}
    inner = {**DYNAMIC, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert fix_fields({**FIELDS, "rope_scaling": inner}, 400)["rope_parameters"] == pytest.approx(partial)
    outer = fix_fields({**FIELDS, "rope_scaling": DYNAMIC, "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 400)
    assert outer["rope_theta"] == pytest.approx(partial["rope_theta"])
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "head_dim": 99, "rope_scaling": DYNAMIC, "rope_theta": 1e4}
    assert fix_fields({**FIELDS, **latent}, 400)["rope_theta"] == pytest.approx(partial["rope_theta"])


def test_kinds_of_layers_are_fixed_where_they_are_dynamic() -> None:
    other = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    kinds = {"full_attention": {**DYNAMIC, "rope_theta": 1e4}, "sliding_attention": other}
    found = fix_fields({"text_config": {**FIELDS, "rope_parameters": kinds}, "vision_config": {}}, 400)
    assert found["vision_config"] == {}
    assert found["text_config"]["rope_parameters"] == {"full_attention": FIXED, "sliding_attention": other}
    assert found["text_config"]["max_position_embeddings"] == 400


def test_other_kinds_stay() -> None:
    for rope in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}):
        assert fix_fields({**FIELDS, **rope}, 400) == {**FIELDS, **rope}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**DYNAMIC, "alpha": 1000.0}, "dynamic RoPE with alpha = 1000.0 does not depend on length; leave it out"),
        (DYNAMIC, "config.json has rope_theta = None, but dynamic RoPE is fixed by a number above 0; add rope_theta"),
        ({**DYNAMIC, "rope_theta": 1e4, "factor": "2"}, "config.json has factor = '2', but"),
    ],
)
def test_what_cannot_be_fixed_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        fix_fields({**FIELDS, "rope_parameters": rope}, 400)
    assert caught.value.where == "model.rope_tokens"
