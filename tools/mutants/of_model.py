"""Mutations of a model folder: config.json, safetensors with their index, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.models import shape_of
from tools.mutants.inputs import fields_of, safetensors_bytes, tensors_header
from tools.mutants.one_case import ALL, RUNS, Case
from tools.mutants.values import HUGE, garbage, shown

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 0.5, 64.0, 1e300, "", "x", "64", "null", [], [1], [[]], {}, {"a": 1}),
    [None],
    *(float("nan"), float("inf"), "x" * 5000, {"factor": 2.0}, {"rope_type": "linear"}, *HUGE),
)
_COUNTS = frozenset(
    (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        *("max_position_embeddings", "num_local_experts", "num_experts", "num_experts_per_tok", "n_routed_experts"),
        *("moe_intermediate_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    )
)
_MAY_BE_ABSENT = frozenset({"num_key_value_heads", "head_dim", "q_lora_rank", "num_experts"})
_SHAPES = _COUNTS - {
    "max_position_embeddings",
    "num_experts_per_tok",
    "intermediate_size",
}  # fields that tensors' shapes follow from
_ROPE: tuple[Any, ...] = (
    *(5, "x", [], ["yarn"], {"rope_type": 5}, {"rope_type": "x"}, {"rope_type": "yarn"}, {"type": ["linear"]}),
    *({"rope_type": "linear", "factor": value} for value in ("2", 0, -1, None, [], 1e400, True, {})),
    *(
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": value}
        for value in ("x", -5, 1.5, 10**30, [])
    ),
    *({"rope_type": "default", "rope_theta": value} for value in ("x", 0, -1.0, [], {}, True)),
    *(
        {"rope_type": "yarn", "factor": 2.0, name: "x"}
        for name in ("mscale", "beta_fast", "truncate", "attention_factor")
    ),
    {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": "1"},
    {"rope_type": "default", "partial_rotary_factor": "1"},
    {"a": {"b": 1}},
)
_MARK_REMOVED = object()


def field(case: Case) -> None:
    """Another value of one field of config.json."""
    rng, fields = case.rng, fields_of(case.family)
    name = rng.choice([*fields, "head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta"])
    value = rng.choice(_ROPE) if name.startswith("rope_") and rng.random() < 0.7 else rng.choice(_ODD)
    fields[name] = value
    write_json(case.folder / "model" / "config.json", fields)
    case.changed(
        f"{case.family} config.json: {name} = {shown(value)}", name, "config.json", wrong_for=_wrong(name, value)
    )


def _wrong(name: str, value: Any) -> frozenset[str]:
    """The commands for which a field's value is certainly wrong."""
    if name in _COUNTS or name in ("head_dim", "num_key_value_heads"):
        if value is None:
            return ALL if name in _COUNTS and name not in _MAY_BE_ABSENT else frozenset()
        if type(value) is not int or value < 1:
            return ALL
        return RUNS if name in _SHAPES and value not in (2, 64) else frozenset()
    if name in ("rms_norm_eps", "rope_theta") and value is not None:
        return ALL if type(value) not in (int, float) or not 0 < value < float("inf") else frozenset()
    if name in ("tie_word_embeddings", "norm_topk_prob") and value is not None:
        return ALL if not isinstance(value, bool) else frozenset()
    if name == "architectures":
        return ALL
    if (
        name in ("rope_parameters", "rope_scaling")
        and value is not None
        and value != {}
        and not isinstance(value, dict)
    ):
        return ALL
    return frozenset()


def fields(case: Case) -> None:
    """A field of config.json removed, added or named otherwise."""
    rng, found = case.rng, fields_of(case.family)
    name = rng.choice([*found])
    way = rng.choice(("removed", "added", "renamed", "nested"))
    if way == "removed":
        del found[name]
    elif way == "added":
        name = rng.choice(
            ("new_field", "quantization_config", "auto_map", "sliding_window", "attention_bias", "", "x" * 300)
        )
        found[name] = rng.choice(_ODD)
    elif way == "renamed":
        found[f"{name}_"] = found.pop(name)
    else:
        found = {"text_config": found}
        name = "architecture"
    write_json(case.folder / "model" / "config.json", found)
    needed = (_COUNTS - _MAY_BE_ABSENT) | {"architectures"}
    wrong = way == "nested" or (way == "renamed") or (way == "removed" and name in needed) or name == "new_field"
    case.changed(
        f"{case.family} config.json: {name} {way}", name, "config.json", wrong_for=ALL if wrong else frozenset()
    )


def damaged(case: Case) -> None:
    """Bytes of a file of the model folder."""
    name = case.rng.choice(
        ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    )
    folder = case.rng.choice(("model", "model", "reward"))
    file = case.folder / folder / name
    way, data = garbage(case.rng, file.read_bytes())
    file.write_bytes(data)
    clearly = way in (
        "empty",
        "random",
        "deep",
        "deep objects",
        "a number",
        "a list",
        "a string",
        "null",
        "NaN",
        "twice",
    )
    clearly = clearly and not (name == "tokenizer_config.json" or (folder == "reward" and name.startswith("tokenizer")))
    reads = ALL if name == "config.json" and folder == "model" else RUNS
    case.changed(f"{folder}/{name}: {way}", name, folder, wrong_for=reads if clearly else frozenset())


def header(case: Case) -> None:
    """The header of a safetensors file."""
    rng = case.rng
    found, size = tensors_header(shape_of(fields_of(case.family)))
    tensor = rng.choice([name for name in found if name != "__metadata__"])
    entry = found[tensor]
    first, last = entry["data_offsets"]
    ways: dict[str, Any] = {
        "data_offsets": (
            *([first, last + 4], [last, first], [-4, last], [first], [], None, "x", [first, "x"], [1.5, 2.5]),
            *([first, 10**30], [True, False], {"a": 1}, [first, last, last], [0, last], [[first], [last]], 5),
        ),
        "shape": (
            None,
            "x",
            [],
            [1],
            [-1, 5],
            [1.5],
            ["64", "64"],
            5,
            {"a": 1},
            [10**30],
            [[64]],
            [0],
            [True],
            entry["shape"][:-1],
        ),
        "dtype": (None, "", "F64", "I8", 5, [], {}, "x" * 5000, "bf16"),
    }
    name = rng.choice([*ways])
    value = rng.choice((*ways[name], _MARK_REMOVED))
    if value is _MARK_REMOVED:
        del entry[name]
    else:
        entry[name] = value
    text = json.dumps(found).encode()
    (case.folder / "model" / "model.safetensors").write_bytes(safetensors_bytes(text, size))
    what = "removed" if value is _MARK_REMOVED else shown(value)
    wrong = RUNS if name == "shape" or value is _MARK_REMOVED or not isinstance(value, list | str) else frozenset()
    case.changed(f"header of {tensor}: {name} = {what}", "model.safetensors", wrong_for=wrong)


def whole_header(case: Case) -> None:
    """A header of another form, or a length that does not belong to it."""
    rng = case.rng
    found, size = tensors_header(shape_of(fields_of(case.family)))
    text = json.dumps(found).encode()
    ways: dict[str, bytes] = {
        **{
            f"length {length}": length.to_bytes(8, "little") + text
            for length in (0, 1, 2**31, 2**63, 2**64 - 1, 99_999_999)
        },
        "deep": safetensors_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, size),
        "deep list": safetensors_bytes(b"[" * 500_000, 0),
        "empty object": safetensors_bytes(b"{}", 0),
        "list": safetensors_bytes(b"[]", 0),
        "entries are numbers": safetensors_bytes(json.dumps(dict.fromkeys(found, 5)).encode(), size),
        "entries are null": safetensors_bytes(json.dumps(dict.fromkeys(found)).encode(), size),
        "entries are lists": safetensors_bytes(json.dumps({name: [[0, 4]] for name in found}).encode(), size),
        "metadata is a number": safetensors_bytes(json.dumps({**found, "__metadata__": 5}).encode(), size),
        "one more tensor": safetensors_bytes(
            json.dumps({**found, "extra": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), size
        ),
        "all in one place": safetensors_bytes(
            json.dumps({k: {**v, "data_offsets": [0, 4]} if "dtype" in v else v for k, v in found.items()}).encode(), 4
        ),
        "data too short": safetensors_bytes(text, size - 1),
        "data too long": safetensors_bytes(text, size + 1),
        "a long number": safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}", 0),
    }
    way = rng.choice([*ways])
    (case.folder / "model" / "model.safetensors").write_bytes(ways[way])
    fine = ("metadata is a number", "one more tensor")
    case.changed(
        f"model.safetensors: {way}",
        "model.safetensors",
        "/model",
        "model:",
        wrong_for=frozenset() if way in fine else RUNS,
    )


def index(case: Case) -> None:
    """An index of several files, which names what it should not."""
    rng, folder = case.rng, case.folder / "model"
    found, _ = tensors_header(shape_of(fields_of(case.family)))
    good = {name: "model.safetensors" for name in found if name != "__metadata__"}
    one = rng.choice([*good])
    values: tuple[Any, ...] = (
        *("nowhere.safetensors", "../model/model.safetensors", "/etc/passwd", "n" * 300, "a\0b", "", "."),
        "config.json",
        *(5, None, [], ["model.safetensors"], {"a": "b"}, "\ud800", "model.safetensors/inside", "x/" * 3000),
    )
    value = rng.choice(values)
    maps: tuple[Any, ...] = (None, 5, [], {}, "x", [good], {"": ""}, {"a": {}})
    whole = rng.random() < 0.3
    weight_map = rng.choice(maps) if whole else {**good, one: value}
    document = rng.choice(
        ({"weight_map": weight_map}, {"metadata": {}, "weight_map": weight_map}, {"weight_map": weight_map})
    )
    write_json(folder / "model.safetensors.index.json", document)
    what = f"weight_map {shown(weight_map)}" if whole else f"{one} in {shown(value)}"
    case.changed(f"index: {what}", "model.safetensors", "index.json", one, "config.json", wrong_for=RUNS)


def tokenizer(case: Case) -> None:
    """A strange tokenizer.json, tokenizer_config.json or generation_config.json."""
    rng, folder = case.rng, case.folder / "model"
    vocab = {f"word{number}": number for number in range(20)}
    good: dict[str, Any] = {
        "model": {"type": "WordLevel", "vocab": vocab},
        "added_tokens": [{"id": 20, "content": "<end>"}],
    }
    place = rng.choice(("model", "vocab", "one id", "added_tokens", "id", "chat_template"))
    value = rng.choice(
        (*_ODD, [["a", 0.5], ["b", 0.1]], {"a": None}, {"a": "1"}, [{"id": "x"}], [{}], [5], {"a": 10**6})
    )
    if place == "chat_template":
        write_json(folder / "tokenizer_config.json", {"chat_template": value, "eos_token": value})
        case.changed(f"tokenizer_config.json: {shown(value)}", "chat", "tokenizer_config.json")
        return
    if place == "model":
        good["model"] = value
    elif place == "vocab":
        good["model"]["vocab"] = value
    elif place == "one id":
        vocab["word3"] = value
    elif place == "added_tokens":
        good["added_tokens"] = value
    else:
        good["added_tokens"][0]["id"] = value
    write_json(folder / "tokenizer.json", good)
    number = type(value) is int and value >= 0
    wrong = place in ("one id", "id") and (not number or value >= 32)
    case.changed(
        f"tokenizer.json: {place} = {shown(value)}", "tokenizer.json", wrong_for=RUNS if wrong else frozenset()
    )


def checkpoint(case: Case) -> None:
    """Files that make the folder look like a torch_dist checkpoint."""
    rng, folder = case.rng, case.folder / "model"
    name = rng.choice((".metadata", "metadata.json", "common.pt"))
    way, data = garbage(rng, b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R." * 2)
    (folder / name).write_bytes(data)
    wrong = RUNS if name != "common.pt" else frozenset()
    case.changed(f"model/{name}: {way}", ".metadata", "metadata.json", "common.pt", wrong_for=wrong)


def write_json(file: Path, value: Any) -> None:
    """Writes JSON as Python does, with NaN and lone surrogates."""
    file.write_text(json.dumps(value))
