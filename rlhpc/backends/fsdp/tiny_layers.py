"""Selects layers of a configuration so that each kind is there once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 8  # layers
_LEAST = 2  # a layer that follows another one shows more than a single one
_COUNT = re.compile(r"num_(hidden_|decoder_|encoder_)?layers|n_layers?|(decoder|encoder)_layers|depth")
# Layers from the first on, and from the last back, that differ from others.
_FIRST = re.compile(r"first_k_dense_replace|(num|n)_dense_layers|moe_layer_start_index|num_hash_layers")
_LAST = re.compile(r"num_kv_shared_layers")
# Every n-th layer differs. Unused where layer_types says the same.
_PERIOD = re.compile(r".*(_period|_interval|_freq|_every_n_layers|_step|sliding_window_pattern)")
_FOR_TYPES = re.compile(r"_?sliding_window_pattern|full_attention_interval|global_attn_every_n_layers")
_INDICES = re.compile(r".*(_layers|_idxs|_ids|_indices)")


def pick_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with few layers: the first of each kind, or the first ones where a period decides."""
    count = next((v for k, v in settings.items() if _COUNT.fullmatch(k) and type(v) is int and v > 0), None)
    if count is None:
        return dict(settings)
    of_layers = {key: value for key, value in settings.items() if _is_per_layer(value, count)}
    indices = {k: v for k, v in settings.items() if _is_indices(k, v, count)}
    of_layers = {key: value for key, value in of_layers.items() if key not in indices}
    by_number = {k: v for k, v in settings.items() if isinstance(v, Mapping) and v and all(map(_is_number, v))}
    selected = _selected(
        settings,
        count,
        [value for value in of_layers.values() if not isinstance(value[0], float)],
        [*indices.values(), *([int(layer) for layer in value] for value in by_number.values())],
    )
    found = dict(settings)
    for key, value in settings.items():
        if key in of_layers:
            picked = [value[layer] for layer in selected]
            found[key] = "".join(picked) if isinstance(value, str) else picked
        elif key in indices:
            found[key] = [place for place, layer in enumerate(selected) if layer in value]
        elif key in by_number:
            values = {int(layer): item for layer, item in value.items()}
            found[key] = {str(place): values[layer] for place, layer in enumerate(selected) if layer in values}
        elif type(value) is int and _FIRST.fullmatch(key):
            found[key] = sum(layer < value for layer in selected)
        elif type(value) is int and _LAST.fullmatch(key):
            found[key] = sum(layer >= count - value for layer in selected)
        elif _COUNT.fullmatch(key) and type(value) is int and value > 0:
            found[key] = len(selected) if value == count else min(value, _LEAST)
    return found


def _selected(settings: Mapping[str, Any], count: int, of_layers: Sequence[Any], indices: Sequence[Any]) -> list[int]:
    """Numbers of the layers, ascending."""
    firsts = [v for k, v in settings.items() if type(v) is int and _FIRST.fullmatch(k)]
    firsts += [count - v for k, v in settings.items() if type(v) is int and _LAST.fullmatch(k)]
    kinds = [
        (*(str(value[layer]) for value in of_layers), *(layer in set(v) for v in indices), *(layer < f for f in firsts))
        for layer in range(count)
    ]
    selected = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    typed = "layer_types" in settings or "layers_block_type" in settings
    periods = [
        value
        for key, value in settings.items()
        if type(value) is int and value > 1 and _PERIOD.fullmatch(key) and not (typed and _FOR_TYPES.fullmatch(key))
    ]
    if periods:
        selected = list(range(min(count, max(*periods, *(layer + 1 for layer in selected)))))
    selected = selected[:_MOST]
    more = (layer for layer in range(selected[-1] + 1, count))
    while len(selected) < min(_LEAST, count):
        selected.append(next(more, selected[-1]))
    return selected


def _is_number(key: Any) -> bool:
    return str(key).isdecimal()


def _is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple | str) and len(value) == count and count > 1


def _is_indices(key: str, value: Any, count: int) -> bool:
    """Whether the value lists layers by their numbers."""
    if not isinstance(value, list | tuple) or not _INDICES.fullmatch(key) or key.endswith("token_ids"):
        return False
    return all(type(item) is int and item < count for item in value) and sorted(set(value)) == list(value)
