"""Mutations of the configuration, of overrides and of the site file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from tools.mutants import schema
from tools.mutants.inputs import CONFIG, SITE, config_of, write_yaml
from tools.mutants.one_case import ALL, Case
from tools.mutants.values import NUMBERS, PATHS, Raw, bomb, garbage, odd_value, shown

_MARK = "PLACE-OF-RAW-YAML"
_CONTAINED = frozenset({"arguments", "template_arguments"})  # keys that take any value inside

# Keys of a run of four ranks, of which two generate.
_ROLES: dict[str, Any] = {
    "placement": "separate",
    "resources.ranks_per_node": 4,
    "slurm.nodes": 1,
    "slurm.gpus_per_node": 4,
    "rollout.ranks": 2,
    "rollout.tp": 1,
    "asynchrony.max_staleness": 2,
    "train.replay.fraction": 0.25,
    "train.replay.max_staleness": 8,
}

# Words that are hardly overrides, of which some are.
_WORDS = (
    *("=", "a", "=1", "a=", ".=1", "a..b=1", "train.=1", ".train.steps=1", "train.steps", "train.steps==3"),
    *("train steps=3", "rewards.0.name=x", "rewards.1.name=x", "rewards.2.name=x", "rewards.9.name=x"),
    *("rewards.-1.name=x", "rewards.x=1", "rewards.0=1", "data.train.0=validation.jsonl"),
    *("data.train.2.path=train.jsonl", "data.train.99999999999999999999=train.jsonl", "data.train.0.path.x=1"),
    *("train.steps.x=1", "train.steps.0=1", "name.0=a", "train=3", "model=model", "slurm.nodes.0=1"),
    *("slurm.nodes=[2,1]", "slurm.nodes=[1,2]", "rewards=[]", "rewards.0={}", "rewards.0.function=null"),
    *("rewards.٣.name=x", "data.train.²=x", "a" * 300 + "=1", ".".join("a" * 3000) + "=1"),
    *("train." + "steps." * 500 + "x=1", "reward.function=mine:score", "lr=1", "--unknown", "-x", "@file"),
)
_FINE = frozenset(
    (
        *("rewards.0.name=x", "rewards.1.name=x", "data.train.0=validation.jsonl", "data.train.2.path=train.jsonl"),
        "slurm.nodes=[1,2]",
    )
)


def value_in_file(case: Case) -> None:
    """Another value of one key."""
    key, node = _pick(case.rng)
    value = _value(case.rng, node)
    data = config_of()
    set_at(data, key, _MARK if isinstance(value, Raw) else value)
    _write(case.folder / "config.yaml", data, value)
    _record(case, key, node, value)


def value_on_command_line(case: Case) -> None:
    """Another value of one key, as KEY=VALUE."""
    key, node = _pick(case.rng)
    value = _value(case.rng, node)
    text = str(value) if isinstance(value, Raw) else _flow(value)
    if "\0" in text or len(text) > 60_000 or any("\ud800" <= letter <= "\udfff" for letter in text):
        text, value = "-1", -1
    case.arguments += (
        ("--", f"{key}={text}") if text.startswith("-") and case.rng.random() < 0.5 else (f"{key}={text}",)
    )
    _record(case, key, node, value)


def value_beside_roles(case: Case) -> None:
    """Another value of one key where some ranks only generate."""
    rng, data = case.rng, config_of()
    for key, value in _ROLES.items():
        set_at(data, key, value)
    nodes = [(key, node) for key, node in schema.all_keys() if key in _ROLES or key.startswith("asynchrony.")]
    key, node = rng.choice(nodes) if rng.random() < 0.6 else _pick(rng)
    value = _value(rng, node)
    set_at(data, key, _MARK if isinstance(value, Raw) else value)
    _write(case.folder / "config.yaml", data, value)
    _record(case, key, node, value)


def odd_override(case: Case) -> None:
    """A word that is hardly an override."""
    rng = case.rng
    word = rng.choice(_WORDS)
    case.arguments += (word,)
    if word.startswith("rewards.0") and rng.random() < 0.5:
        data = config_of()
        del data["rewards"], data["train"]["dynamic_sampling"]
        write_yaml(case.folder / "config.yaml", data)
    key = word.partition("=")[0]
    names = [".".join(key.split(".")[:count]) for count in range(1, 4)] if key.strip(".") else [word]
    case.changed(f"word {shown(word)}", *names, word[:40], wrong_for=frozenset() if word in _FINE else ALL)


def unknown_key(case: Case) -> None:
    """A key that its section does not have."""
    rng = case.rng
    section = rng.choice(schema.sections())
    known = schema.inside(section)
    letters = list(rng.choice(known))
    at = rng.randrange(len(letters))
    typed = "".join([*letters[:at], rng.choice(("", "x", "_", letters[at] * 2)), *letters[at + 1 :]])
    far = rng.choice(("lr", "n", "", " ", "a.b", "é", "x" * 300, "0", "None", "__class__", "model_config", "self"))
    name = typed if rng.random() < 0.6 else far
    data = config_of()
    key = f"{section}.{name}" if section else name
    if name in known:
        name = key = "unknown"
    target = at_key(data, section)
    (target if isinstance(target, dict) else data)[name] = rng.choice((1, None, {"a": 1}, "x"))
    write_yaml(case.folder / "config.yaml", data)
    where = section or "config.yaml"
    case.changed(f"unknown key {shown(key)}", name or where, where, where.removesuffix(".0"), wrong_for=ALL)


def many_faults(case: Case) -> None:
    """Hundreds of unknown keys, as in another toolkit's configuration."""
    data = config_of()
    count = case.rng.choice((30, 300, 3000))
    section = case.rng.choice(("", "train", "model", "actor_rollout_ref"))
    target = at_key(data, section)
    target.update({f"unknown_{number}": {"lr": number} for number in range(count)})
    write_yaml(case.folder / "config.yaml", data)
    case.changed(f"{count} unknown keys in {section!r}", "unknown_", "actor_rollout_ref", wrong_for=ALL)


def removed_key(case: Case) -> None:
    """One key of the configuration, a needed one or not, is not there."""
    data = config_of()
    paths = [path for path in _paths(data) if path]
    path = case.rng.choice(paths)
    parent = at_key(data, ".".join(path[:-1]))
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    write_yaml(case.folder / "config.yaml", data)
    needed = {
        ("name",),
        ("model",),
        ("model", "path"),
        ("train",),
        ("train", "steps"),
        ("sft", "steps"),
        ("sft", "data"),
    }
    key = ".".join(path)
    case.changed(f"{key} removed", key, *path, *path[:1], wrong_for=ALL if tuple(path) in needed else frozenset())


def document(case: Case) -> None:
    """A damaged or strange YAML file: the configuration's or the site's."""
    rng = case.rng
    name, value = rng.choice((("config.yaml", CONFIG), ("config.yaml", CONFIG), ("site.yaml", SITE)))
    text = yaml.dump(value, sort_keys=False)
    what, data, wrong = _document(rng, text)
    (case.folder / name).write_bytes(data)
    wrong = wrong and (name, what) != ("site.yaml", "comments alone")
    case.changed(f"{name}: {what}", name, *_CONFIG_WORDS, wrong_for=ALL if wrong else frozenset())


_CONFIG_WORDS = tuple(f"{section}" for section in CONFIG)


def _document(rng: random.Random, text: str) -> tuple[str, bytes, bool]:
    at = text.index("\n") + 1
    big = "# " + "x" * 1_000_000 + "\n"
    ways: dict[str, tuple[str, bool]] = {
        "alias bomb": (text + bomb(rng), True),
        "alias bomb as a value": (bomb(rng) + text.replace("seed: 1", "seed: *a1") + "x: *a3\n", True),
        "refers to itself": (text + "more: &m {inside: *m}\n", True),
        "merges a bomb": (
            text + "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 25)),
            True,
        ),
        "two documents": (text + "---\n" + text, True),
        "empty document first": ("---\n---\n" + text, True),
        "tabs": (text.replace("  ", "\t"), True),
        "deep": (text + "deep: " + "[" * 10_000 + "\n", True),
        "deep and closed": (text + "deep: " + "[" * 2000 + "]" * 2000 + "\n", True),
        "deep by lines": (text + "deep:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 1500)), True),
        "python object": (text + "x: !!python/object/apply:os.getpid []\n", True),
        "unknown tag": (text[:at] + "extra: !thing {a: 1}\n" + text[at:], True),
        "a list": ("- a\n- b\n", True),
        "a word": ("word\n", True),
        "comments alone": ("# nothing\n", True),
        "number keys": (text + "1: 2\n3.5: 4\nnull: 5\ntrue: 6\n", True),
        "complex keys": (text + "? [a, b]\n: c\n", True),
        "a date": (text + "x: 2024-01-01\ny: 2024-01-01T00:00:00Z\n", True),
        "20 MB": (text + big * 20, True),
        "many lines": (text + "x:\n" + "- a\n" * 200_000, True),
        "a long line": (text + "x: " + "y" * 3_000_000 + "\n", True),
        "a long key": (text + "y" * 2000 + ": 1\n", True),
        "an escaped surrogate": (text + 'x: "\\ud83d"\n', True),
    }
    way = rng.choice([*ways, "bytes", "bytes"])
    if way == "bytes":
        way, data = garbage(rng, text.encode())
        whole = ("empty", "UTF-16", "twice", "deep", "deep objects", "a number", "a list", "a string", "null")
        return way, data, way in whole and way not in ("empty", "null")
    return way, ways[way][0].encode(), ways[way][1]


def site_value(case: Case) -> None:
    """A wrong key or value in the site file."""
    rng, data = case.rng, config_of(SITE)
    section = rng.choice([*SITE])
    value = odd_value(rng)
    value = -1 if isinstance(value, Raw) else value
    key = rng.choice([*SITE[section], "unknown"])
    if rng.random() < 0.3:
        data[section], key = value, section
    else:
        data[section][key] = value
    _write(case.folder / "site.yaml", data, value)
    case.changed(f"site.yaml: {section}.{key} = {shown(value)}", "site.yaml", "site.gpus", section, key)


def _pick(rng: random.Random) -> tuple[str, Any]:
    if rng.random() < 0.6:  # keys that the configuration has
        present = {".".join("0" if part.isdecimal() else part for part in path) for path in _paths(CONFIG)}
        return rng.choice([(key, node) for key, node in schema.all_keys() if key in present])
    return rng.choice(schema.all_keys())


def _value(rng: random.Random, node: Any) -> Any:
    paths = any(option.get("format") == "path" for option in schema.options(node))
    numbers = any(option.get("type") in ("integer", "number") for option in schema.options(node))
    draw = rng.random()
    if paths and draw < 0.5:
        return rng.choice(PATHS)
    if numbers and draw < 0.5:
        return rng.choice(NUMBERS)
    words = [word for option in schema.options(node) for word in option.get("enum", ())]
    if words and draw < 0.4:
        return rng.choice((*words, words[0].upper(), f"{words[0]}x", words[0][:-1]))
    return odd_value(rng)


def _record(case: Case, key: str, node: Any, value: Any) -> None:
    last = key.rpartition(".")[2]
    parts = [part for part in key.split(".") if part != "0"]
    free = bool(_CONTAINED & set(parts)) or key == "site"
    wrong = not isinstance(value, Raw) and not free and schema.fit_at(key, value) == "no"
    holder = ".".join(key.split(".")[:-1])
    names = [key, last, holder or key, *parts[:1]]
    if isinstance(value, Raw) or "\\" in repr(value) or (isinstance(value, int) and abs(value) > 10**100):
        names.append("config.yaml:")  # a fault of the YAML is at its line
    if isinstance(value, str) and len(value) > 2:
        names.append(value[:60])  # a file that is named by its path
    case.changed(f"{key} = {shown(value)}", *names, wrong_for=ALL if wrong else frozenset())


def _write(file: Path, data: dict[str, Any], value: Any) -> None:
    text = yaml.dump(data, sort_keys=False)
    if isinstance(value, Raw):
        text = text.replace(_MARK, value)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def _flow(value: Any) -> str:
    text = yaml.dump(value, default_flow_style=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def at_key(data: Any, key: str) -> Any:
    """The section at a dotted key; made, or replaced by a section, where it is not one."""
    for part in key.split(".") if key else ():
        if isinstance(data, list):
            data += [{}] * (not data)
            index = int(part) if part.isdecimal() and int(part) < len(data) else 0
            data[index] = data[index] if isinstance(data[index], dict) else {}
            data = data[index]
        else:
            if not isinstance(data.get(part), dict | list):
                data[part] = {}
            data = data[part]
    return data


def set_at(data: Any, key: str, value: Any) -> None:
    """Sets the value at a dotted key."""
    above, _, last = key.rpartition(".")
    holder = at_key(data, above)
    if isinstance(holder, list):
        holder[:1] = [value]
    elif last == "0":
        set_at(data, above, [value])
    else:
        holder[last] = value


def _paths(data: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [above, *(path for key, item in items for path in _paths(item, (*above, str(key))))]
