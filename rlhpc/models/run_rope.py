"""One table of frequencies per run for LongRoPE, whose short factors hold up to the model's original length.

transformers chooses the table again in each pass, by its longest document; keys in an engine's cache would keep that of
an earlier pass. A run takes one: the long factors if its longest sequence exceeds the original length, as vLLM does
(phi3_long_rope_scaled_rope.py, use_long_rope). With the long factors in place of the short ones, transformers has no
other table to choose. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Parameters = Mapping[str, Any]  # of one rotary embedding, or by kind of layer

LONGROPE = ("longrope", "su")  # the second one in older files
_PAIRS = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))


def text_section(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and contents of the part of a config.json that describes its text: "" and all without such a part."""
    inner = fields.get("text_config")
    return ("text_config", inner) if isinstance(inner, Mapping) else ("", fields)


def stored_parameters(section: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, or ``rope_scaling`` of older files; empty where they are no objects."""
    both = (section.get("rope_scaling"), section.get("rope_parameters"))
    return {name: value for given in both if isinstance(given, Mapping) for name, value in given.items()}


def kind_of(parameters: Parameters) -> str:
    """The ``rope_type``, by its name in files of any age."""
    found = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return "longrope" if found in LONGROPE else found


def parameter_sets(parameters: Parameters) -> list[Parameters]:
    """Parameters of each rotary embedding: one, or one for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def change_sets(parameters: Parameters, change: Callable[[Parameters], Parameters]) -> dict[str, Any]:
    """The same parameters with each set changed."""
    nested = {name: dict(change(value)) for name, value in parameters.items() if isinstance(value, Mapping)}
    return {**parameters, **nested} if nested else dict(change(parameters))


def with_run_table(parameters: Parameters, tokens: int) -> dict[str, Any]:
    """Parameters of transformers for a run whose longest sequence has ``tokens`` tokens: beyond the original length
    with the long factors alone; else unchanged."""

    def change(found: Parameters) -> Parameters:
        if kind_of(found) != "longrope" or tokens <= found["original_max_position_embeddings"]:
            return found
        return {**found, **{short: found[long] for short, long in _PAIRS if long in found}}

    return change_sets(parameters, change)


def has_one_table(parameters: Parameters) -> bool:
    """Whether LongRoPE's factors are the same for all lengths."""
    return all(_equal(parameters.get(short), parameters.get(long)) for short, long in _PAIRS)


def _equal(first: Any, second: Any) -> bool:
    return (
        list(first) == list(second) if isinstance(first, Iterable) and isinstance(second, Iterable) else first == second
    )
