"""Rotary tables of a run: one table of LongRoPE, and dynamic NTK RoPE fixed at one length. Pure.

LongRoPE's short factors hold up to the model's original length. transformers chooses the table again in each pass, by
its longest document; keys in an engine's cache would keep that of an earlier pass. A run takes one: the long factors if
its longest sequence exceeds the original length, as vLLM does (phi3_long_rope_scaled_rope.py, use_long_rope). With the
long factors in place of the short ones, transformers has no other table to choose.

Beyond a model's positions the base of dynamic RoPE follows from the longest sequence of a pass (transformers,
_compute_dynamic_ntk_parameters), so that older entries of a KV cache would be wrong. At one length it is default RoPE
with another base, which trainer, engine and exported model compute alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlhpc.core.errors import UserError

Parameters = Mapping[str, Any]  # of one rotary embedding, or by kind of layer

LONGROPE = ("longrope", "su")  # the second one in older files
_PAIRS = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
_POSITIONS = "max_position_embeddings"
_SECTIONS = ("rope_scaling", "rope_parameters")


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
    """Parameters with each set changed."""
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
    """True if LongRoPE's factors are the same for all lengths."""
    return all(_equal(parameters.get(short), parameters.get(long)) for short, long in _PAIRS)


def _equal(first: Any, second: Any) -> bool:
    return (
        list(first) == list(second) if isinstance(first, Iterable) and isinstance(second, Iterable) else first == second
    )


def has_dynamic_rope(fields: Mapping[str, Any]) -> bool:
    """True if the fields of a config.json have dynamic RoPE, for one kind of layer at least."""
    return is_dynamic(stored_parameters(text_section(fields)[1]))


def is_dynamic(parameters: Parameters) -> bool:
    """True if one of the rotary embeddings is dynamic."""
    return any(kind_of(found) == "dynamic" for found in parameter_sets(parameters))


def fix_parameters(parameters: Parameters, dim: int, positions: int, tokens: int) -> dict[str, Any]:
    """Parameters with dynamic RoPE fixed at ``tokens`` tokens, the others unchanged. ``dim``: rotated dimensions of a
    head; ``positions``: the model's. Raises UserError for a kind of another definition."""

    def change(found: Parameters) -> Parameters:
        if kind_of(found) != "dynamic":
            return found
        if found.get("alpha"):
            message = f"dynamic RoPE with alpha = {found['alpha']!r} does not depend on length"
            raise UserError(message, where="model.rope_tokens", remedy="leave it out")
        factor, theta = _number(found, "factor"), _number(found, "rope_theta")
        longest = max(tokens, positions)
        stretched = (factor * longest / positions - (factor - 1)) ** (dim / (dim - 2))
        kept = {name: found[name] for name in ("partial_rotary_factor",) if name in found}
        return {"rope_type": "default", "rope_theta": theta * stretched, **kept}

    return change_sets(parameters, change)


def fix_fields(fields: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Fields of a config.json with dynamic RoPE fixed at ``tokens`` tokens, and as many positions at least; unchanged
    without dynamic RoPE. Raises UserError for fields that are missing."""
    name, section = text_section(fields)
    if not has_dynamic_rope(fields):
        return dict(fields)
    outer = {key: section[key] for key in ("rope_theta",) if key in section}
    given = change_sets(stored_parameters(section), lambda found: {**outer, **found})
    positions = int(_number(section, _POSITIONS))
    fixed = fix_parameters(given, rotated_dimensions(section, given), positions, tokens)
    changed = {key: value for key, value in section.items() if key not in _SECTIONS}
    older = "rope_parameters" not in section and fixed.keys() == {"rope_type", "rope_theta"}
    changed |= {_POSITIONS: max(positions, tokens)} | ({} if older else {"rope_parameters": fixed})
    if older or "rope_theta" in section:
        changed["rope_theta"] = fixed.get("rope_theta", section.get("rope_theta"))
    return {**fields, name: changed} if name else changed


def rotated_dimensions(section: Mapping[str, Any], parameters: Parameters) -> int:
    """Rotated dimensions of a head, from the fields that describe a model's text."""
    if section.get("kv_lora_rank") and section.get("qk_rope_head_dim"):
        return int(_number(section, "qk_rope_head_dim"))
    if section.get("head_dim"):
        head = _number(section, "head_dim")
    else:
        head = _number(section, "hidden_size") // _number(section, "num_attention_heads")
    dynamic = next(found for found in parameter_sets(parameters) if kind_of(found) == "dynamic")
    partial = dynamic.get("partial_rotary_factor") or section.get("partial_rotary_factor") or 1.0
    return max(4, int(head * partial))


def _number(values: Mapping[str, Any], name: str) -> float:
    found: Any = values.get(name)
    if type(found) not in (int, float) or not 0 < found <= 1e12:
        raise UserError(
            f"the model's config.json has {name} = {repr(found)[:80]}, but dynamic RoPE is fixed by a number above 0",
            where="model.rope_tokens",
            remedy=f"add {name} to the file as the model was published",
        )
    return float(found)
