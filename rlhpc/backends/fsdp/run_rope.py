"""Gives a model of transformers the rotary tables of a run (rlhpc.models.run_rope)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from rlhpc.models.run_rope import has_one_table, with_run_table

_FIXED = "fixed"  # no name of transformers, which then leaves the table alone (dynamic_rope_update)


def with_run_rope(config: PretrainedConfig, tokens: int) -> PretrainedConfig:
    """A copy of the configuration for a run whose longest sequence has ``tokens`` tokens."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if parameters := getattr(text, "rope_parameters", None):
        text.rope_parameters = with_run_table(parameters, tokens)
    return config


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
