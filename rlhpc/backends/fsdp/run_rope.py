"""Gives a model of transformers the rotary tables of a run (rlhpc.models.rope)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from rlhpc.models.rope import fix_parameters, has_one_table, is_dynamic, kind_of, parameter_sets, with_run_table

_FIXED = "fixed"  # no name of transformers, which then leaves the table alone (dynamic_rope_update)


def with_run_rope(config: PretrainedConfig, tokens: int, fixed: int | None = None) -> PretrainedConfig:
    """A copy of the configuration for a run whose longest sequence has ``tokens`` tokens, with dynamic RoPE fixed at
    ``fixed`` tokens, if given."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return config
    if fixed is not None and is_dynamic(parameters):
        positions = text.max_position_embeddings
        parameters = fix_parameters(parameters, _rotated(text, parameters), positions, fixed)
        text.max_position_embeddings = max(positions, fixed)
    text.rope_parameters = with_run_table(parameters, tokens)
    return config


def bases(config: PretrainedConfig) -> set[float]:
    """The bases of a configuration's rotary embeddings."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return {found["rope_theta"] for found in parameter_sets(parameters) if found.get("rope_theta") is not None}


def _rotated(text: PretrainedConfig, parameters: Mapping[str, Any]) -> int:
    """Rotated dimensions of a head, as transformers counts them (_compute_dynamic_ntk_parameters)."""
    dynamic = next(found for found in parameter_sets(parameters) if kind_of(found) == "dynamic")
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head * dynamic.get("partial_rotary_factor", 1.0))


def keep_tables(model: nn.Module) -> None:
    """Ends transformers' choice of a table where a configuration has one alone. In each pass it would wait for the
    longest position, and with tables by kind of layer it fails in the second one (UnboundLocalError)."""
    for module in model.modules():
        kind, parameters = getattr(module, "rope_type", None), _parameters_of(module)
        if isinstance(kind, dict):
            module.rope_type = {layers: _kept(name, parameters.get(layers)) for layers, name in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _kept(kind, parameters)


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    return getattr(getattr(module, "config", None), "rope_parameters", None) or {}


def _kept(kind: str, parameters: Mapping[str, Any] | None) -> str:
    return _FIXED if kind == "longrope" and parameters and has_one_table(parameters) else kind
