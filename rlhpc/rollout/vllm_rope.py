"""Fields of RoPE for vLLM, so that an engine rotates as the trainer does (rlhpc.models.rope, fixed_rope).

Of LongRoPE, vLLM's own models choose a table once, but those of its Transformers back end in each pass; and they scale
attention by max_position_embeddings where transformers takes ``attention_factor`` or ``factor``. Of dynamic RoPE,
vLLM's table ends at the model's positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhpc.models import ModelDescription, has_dynamic_rope
from rlhpc.models.rope import (
    change_sets,
    fix_fields,
    kind_of,
    parameter_sets,
    stored_parameters,
    text_section,
    with_run_table,
)


def rope_overrides(fields: Mapping[str, Any], shape: ModelDescription, tokens: int) -> dict[str, Any]:
    """vLLM's ``hf_overrides`` for a run of ``tokens`` tokens, from the fields of config.json; empty where it would
    compute the same without."""
    name, section = text_section(fields)
    found = stored_parameters(section)
    if not any(kind_of(given) == "longrope" for given in parameter_sets(found)):
        return {}
    whole = change_sets(found, lambda given: _whole(given, section, shape))
    wanted = change_sets(with_run_table(whole, tokens), _scaled)
    if wanted == whole:
        return {}
    changed = {"rope_parameters": wanted}
    return {name: changed} if name else changed


def fixed_overrides(fields: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The same for dynamic RoPE that is fixed at ``tokens`` tokens; empty for other kinds."""
    if not has_dynamic_rope(fields):
        return {}
    name, section = text_section(fix_fields(fields, tokens))
    parameters = stored_parameters(section) or {"rope_type": "default", "rope_theta": section["rope_theta"]}
    if (partial := section.get("partial_rotary_factor")) is not None:
        parameters = change_sets(parameters, lambda given: {"partial_rotary_factor": partial, **given})
    changed = {"rope_parameters": parameters, "max_position_embeddings": section["max_position_embeddings"]}
    return {name: changed} if name else changed


def _whole(given: Mapping[str, Any], section: Mapping[str, Any], shape: ModelDescription) -> dict[str, Any]:
    """All parameters that transformers would add when it reads the file: it has done so when vLLM takes these."""
    if kind_of(given) != "longrope":
        return dict(given)
    original = section.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    theta = given.get("rope_theta") or section.get("rope_theta") or (shape.rope.theta if shape.rope else None)
    found = {name: value for name, value in given.items() if name != "type"}
    found |= {"rope_type": "longrope", "rope_theta": theta}
    found["original_max_position_embeddings"] = original or shape.max_positions
    partial = given.get("partial_rotary_factor") or section.get("partial_rotary_factor")
    return found if partial is None else {**found, "partial_rotary_factor": partial}


def _scaled(given: Mapping[str, Any]) -> dict[str, Any]:
    """With the scale of transformers (_compute_longrope_parameters), where the configuration names one."""
    scale = given.get("attention_factor")
    named = scale is not None or given.get("factor") is not None
    if kind_of(given) != "longrope" or "short_mscale" in given or not named:
        return dict(given)
    if scale is None:
        longer = math.log(max(1.0, given["factor"])) / math.log(given["original_max_position_embeddings"])
        scale = math.sqrt(1 + longer)
    return {**given, "short_mscale": scale, "long_mscale": scale}
