"""A tiny copy of a model's configuration: the same code of transformers, one layer of each kind, small sizes.

Configurations have hundreds of keys. They are recognised by their names, as transformers' models use them; ratios and
flags that select between branches of the code are kept, and so are keys that are not recognised.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 128
FIRST_TOKEN, LAST_TOKEN = 8, 96  # ordinary tokens; special ones are below and above
WINDOW = 8  # tokens, of sliding windows and of chunks
_HEAD = 16  # dimensions of the widest head
_EXPERTS, _ACTIVE = 4, 2
_RANK = 16  # of low-rank projections
_WIDEST = 160
_POSITIONS = 4096  # of embeddings; rotary positions cost nothing
_SOFTCAP = 3.0
_MULTIPLIER = 0.2  # of attention scores, in place of 1 / sqrt(head size)

_NAMES = {
    "vocabulary": r"(.*_)?vocab(_size(_.*)?)?",
    "token": r".*token_(id|index)",
    "window": r"sliding_window(_size)?|(attention_|keep_)?window_size|attention_window_size|local_attention",
    "chunk": r".*chunk_size|block_size|index_block_size|.*chunk_length",
    "experts": r"(num|n|moe_num)_(local_|routed_)?experts|zero_expert_num|num_local_experts",
    "active": r"(num_)?experts_per_tok(en)?|num_experts_per_token|moe_top_?k|moe_k|top_k(_experts)?|index_topk.*",
    "groups": r"n_groups?|mamba_n_?groups|num_expert_groups?|o_groups",
    "active groups": r"topk_group",
    "softcap": r".*(softcapping|soft_cap|softcap)|clip_qkv|swiglu_limit",
    "rank": r".*(_rank|lowrank)",
    "positions": r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_target_positions",
    "hidden": r"hidden_size|n_embd|d_model|(emb_)?dim",
    "heads": r"num_attention_heads|n_heads?|(decoder_|encoder_)?attention_heads|num_heads",
    "kv heads": r"num_key_value_heads|num_kv_heads|kv_n_heads",
    "other heads": r".*_heads?(_per_layer)?",
    "head size": r"(.*_)?head_?(dim|size)|mamba_d_head|kv_channels|d_head|rotary_dim|query_pre_attn_scalar",
    "fixed": r"(image|patch|crop|kernel|tile|batch|audio|input_feat|index|type|spatial|temporal).*|"
    r".*(kernel_size|kernel_dim|patch_size|image_size|conv_kernel)",
    "state": r"(.*_)?(d_state|state_size)",
    "width": r".*(_size.*|_dim|_width|_inner|_channels|ffn_dim|lru_width|dff|_ssm|d_inner|d_ff|size)|d_[a-z]+",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _NAMES.items()}
_DROPPED = {
    *("quantization_config", "auto_map", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("_name_or_path", "output_attentions", "id2label", "label2id"),
}


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a configuration that others follow, with their tiny counterparts."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    tiny_hidden: int
    tiny_heads: int
    tiny_kv_heads: int
    tiny_head: int  # dimensions of the widest head
    real_heads: bool

    def width(self, value: int) -> int:
        """A multiple of 16 in the same ratio to the hidden size, within limits."""
        if value == self.hidden:
            return self.tiny_hidden
        return min(max(16, value * self.tiny_hidden // self.hidden // 16 * 16), _WIDEST)

    def head(self, value: int) -> int:
        """An even head size."""
        return max(4, round(value * self.tiny_head / self.head_size / 4) * 4)

    def count(self, value: int) -> int:
        """A number of heads that are not the main ones."""
        known = {self.heads: self.tiny_heads, self.kv_heads: self.tiny_kv_heads}
        return known.get(value, max(1, value * self.tiny_heads // self.heads))


def tiny_settings(settings: Mapping[str, Any], *, real_heads: bool = False) -> dict[str, Any]:
    """The settings of a configuration, as of ``to_dict()``, made tiny. ``real_heads``: but for sizes of heads and of
    low-rank projections, which an engine's kernels know."""
    return _tiny(settings, None, real_heads=real_heads)


def _tiny(settings: Mapping[str, Any], outer: _Sizes | None, *, real_heads: bool) -> dict[str, Any]:
    sizes = _sizes(settings, real_heads=real_heads) or outer
    kept = pick_layers({key: value for key, value in settings.items() if key not in _DROPPED})
    if sizes is None:
        tiny = functools.partial(_tiny, outer=None, real_heads=real_heads)
        return {key: tiny(value) if isinstance(value, Mapping) else value for key, value in kept.items()}
    found = {key: _value(key, value, kept, sizes) for key, value in kept.items()}
    return {**found, **_related(settings, found)}


def _value(key: str, value: Any, settings: Mapping[str, Any], sizes: _Sizes) -> Any:
    if isinstance(value, Mapping):
        is_rope = key.startswith("rope_") or "rope_type" in value
        return _rope(value, sizes) if is_rope else _tiny(value, sizes, real_heads=sizes.real_heads)
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        kind = _kind(key)
        return [_number(kind, item, settings, sizes) for item in value] if kind in _IN_LISTS else value
    if type(value) is int or (type(value) is float and _kind(key) == "softcap"):
        return _number(_kind(key), value, settings, sizes)
    if key == "attention_multiplier" and isinstance(value, float):
        return _MULTIPLIER
    return value


_IN_LISTS = {"experts", "active", "heads", "kv heads", "other heads", "head size", "width"}


def _kind(key: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(key)), "")


def _number(kind: str, value: Any, settings: Mapping[str, Any], sizes: _Sizes) -> Any:
    if value is None or value <= 0:
        return value
    if kind == "token":
        return value if value < FIRST_TOKEN else VOCABULARY - 1 - value % (VOCABULARY - LAST_TOKEN - 1)
    if kind == "vocabulary":
        return VOCABULARY if value >= FIRST_TOKEN else value  # of types and segments
    if kind == "positions":
        return value if settings.get("rope_parameters") else min(value, _POSITIONS)
    limits = {
        "window": WINDOW,
        "chunk": WINDOW,
        "experts": _EXPERTS,
        "active": _ACTIVE,
        "groups": 2,
        "active groups": 1,
        "softcap": _SOFTCAP,
        "state": 16,
    }
    if kind in limits:
        return min(value, limits[kind])
    if kind == "rank":
        return value if sizes.real_heads else _RANK
    changed = {
        "hidden": sizes.width,
        "width": sizes.width,
        "heads": sizes.count,
        "kv heads": sizes.count,
        "other heads": sizes.count,
        "head size": sizes.head,
    }
    return changed[kind](value) if kind in changed else value


def _sizes(settings: Mapping[str, Any], *, real_heads: bool) -> _Sizes | None:
    """Sizes of a configuration with layers of its own."""
    hidden, heads = _first("hidden", settings), _first("heads", settings)
    if hidden is None:
        return None
    heads = heads or 1
    kv_heads = _first("kv heads", settings) or heads
    head_sizes = [value for key, value in settings.items() if _kind(key) == "head size" and type(value) is int]
    head_sizes = [value for value in head_sizes if value != settings.get("qk_head_dim")] or [max(1, hidden // heads)]
    own = settings.get("head_dim") or hidden // heads
    tiny_heads, tiny_kv = _tiny_heads(heads, kv_heads)
    # Heads may be wider or narrower together than the hidden size.
    head = max(head_sizes) if real_heads else _HEAD
    per_head = head if heads * own == hidden else head // 2 if heads * own > hidden else head * 3 // 2
    tiny = (tiny_heads * per_head, tiny_heads, tiny_kv, head)
    return _Sizes(hidden, heads, kv_heads, max(head_sizes), *tiny, real_heads=real_heads)


def _tiny_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Few heads, with the parity of the real ones and of their ratio, which choose the exchange between ranks."""

    def few(value: int, most: int) -> int:
        return value if value <= most else most - (most - value) % 2

    if heads % kv_heads:
        return few(heads, 4), 1
    group = few(heads // kv_heads, 4)
    kv = few(kv_heads, 4 if group == 1 else 3)
    return group * kv, kv


def _first(kind: str, settings: Mapping[str, Any]) -> int | None:
    found = (value for key, value in settings.items() if _kind(key) == kind and type(value) is int and value > 0)
    return next(found, None)


def _rope(settings: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Rotary settings, of one kind of layer or by kind, for the tiny heads."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            value = _rope(value, sizes)
        elif isinstance(value, list | tuple) and len(value) > 1:
            if key == "mrope_section":
                value = _sections(value, sizes)
            elif key.endswith("_factor"):
                value = list(value)[: max(1, len(value) * sizes.tiny_head // sizes.head_size)]
        found[key] = value
    return found


def _sections(sections: Iterable[int], sizes: _Sizes) -> list[int]:
    """Sections of rotary frequencies, in about the same ratio."""
    whole = [int(section) for section in sections]
    total = max(len(whole), sum(whole) * sizes.tiny_head // sizes.head_size)
    rest = [max(1, section * total // sum(whole)) for section in whole[1:]]
    return [total - sum(rest), *rest]


def _related(settings: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that follow from other ones."""
    found = {}
    if settings.get("qk_nope_head_dim") and settings.get("qk_head_dim"):
        found["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    expand = settings.get("mamba_expand", settings.get("expand"))
    for heads, size in (
        ("mamba_n_heads", "mamba_d_head"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        if expand and settings.get(heads) and settings.get(size):
            found[heads] = max(1, int(expand * tiny["hidden_size"]) // tiny[size])
            found |= {"mamba_d_ssm": found[heads] * tiny[size]} if settings.get("mamba_d_ssm") else {}
    return found


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
    """True if the value lists layers by their numbers."""
    if not isinstance(value, list | tuple) or not _INDICES.fullmatch(key) or key.endswith("token_ids"):
        return False
    return all(type(item) is int and item < count for item in value) and sorted(set(value)) == list(value)
