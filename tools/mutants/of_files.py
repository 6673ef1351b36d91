"""Mutations of data files, of a user's modules, of any file's state, and of options."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from tools.mutants.inputs import config_of, write_yaml
from tools.mutants.one_case import ALL, RUNS, Case
from tools.mutants.values import LONG, PATHS, garbage, shown

_DATA = ("train.jsonl", "train.parquet", "validation.jsonl", "sft.jsonl")
_FILES = (
    *_DATA,
    "config.yaml",
    "site.yaml",
    "mine.py",
    "template.jinja",
    "model/config.json",
    "model/model.safetensors",
)
_OTHERS = ("model/tokenizer.json", "model/tokenizer_config.json", "reward/config.json", "reward/model.safetensors")
_ALWAYS_READ = ("config.yaml", "site.yaml", "model/config.json")


def data(case: Case) -> None:
    """Bytes of a data file."""
    rng = case.rng
    name = rng.choice(_DATA)
    file = case.folder / name
    if name.endswith(".jsonl") and rng.random() < 0.6:
        way, found, wrong = _lines(rng)
    else:
        way, found = garbage(rng, file.read_bytes())
        wrong = way in ("empty", "random", "deep", "a number", "a list", "a string", "null", "NaN")
        wrong = wrong or (name.endswith(".parquet") and way in ("UTF-16", "byte-order mark", "deep objects"))
    file.write_bytes(found)
    case.changed(f"{name}: {way}", name, wrong_for=RUNS if wrong else frozenset())


def _lines(rng: random.Random) -> tuple[str, bytes, bool]:
    ways: dict[str, tuple[bytes, bool]] = {
        "blank lines": (b"\n" * 1000, True),
        "a line of 30 MB": (b"{" + b" " * 30_000_000 + b"}\n", False),
        "30 MB without a line's end": (b"x" * 30_000_000, True),
        "a deep line": (b'{"prompt": ' + b"[" * 100_000 + b"\n", True),
        "a deep, closed line": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", False),
        "a long number": (b'{"prompt": ' + b"1" * 5000 + b"}\n", False),
        "NUL": (b"\0" * 100 + b"\n", True),
        "not UTF-8": (b'{"prompt": "\xff\xfe"}\n', True),
        "a surrogate": (b'{"prompt": "\\ud800"}\n', False),
        "gzip": (b"\x1f\x8b\x08\x00" + rng.randbytes(100), True),
        "CSV": (b"prompt,answer\n1,2\n", True),
        "a JSON array": (b'[{"prompt": "a"}]\n', True),
    }
    way = rng.choice([*ways])
    return way, *ways[way]


def parquet(case: Case) -> None:
    """A Parquet file that is whole but strange."""
    import pyarrow
    from pyarrow import parquet as files

    rng = case.rng
    columns: dict[str, Any] = {
        "no rows": {"prompt": pyarrow.array([], pyarrow.string())},
        "no columns": {},
        "other columns": {"a": [1], "b": ["x"]},
        "binary": {"prompt": [b"\xff\xfe"]},
        "control characters": {"a\nb\x1b[31m": [1], "\u202e": [2]},
        "null": {"prompt": [None]},
    }
    way = rng.choice([*columns])
    files.write_table(pyarrow.table(columns[way]), case.folder / "train.parquet")
    if rng.random() < 0.3:
        found = (case.folder / "train.parquet").read_bytes()
        at = rng.randrange(4, len(found) - 4)
        damage = found[:at] + rng.randbytes(3) + found[at + 3 :]
        (case.folder / "train.parquet").write_bytes(b"PAR1" + damage[4:-4] + b"PAR1")
        way = f"{way}, damaged at {at}"
    case.changed(f"train.parquet: {way}", "train.parquet", wrong_for=RUNS if way == "no rows" else frozenset())


def state(case: Case) -> None:
    """A file that cannot be read, or is of another kind."""
    rng = case.rng
    name = rng.choice((*_FILES, *_OTHERS))
    file = case.folder / name
    ways: dict[str, Any] = {
        "unreadable": lambda: file.chmod(0),
        "removed": lambda: None,
        "a folder": file.mkdir,
        "a FIFO": lambda: os.mkfifo(file),
        "a link to itself": lambda: file.symlink_to(file.name),
        "a link to nothing": lambda: file.symlink_to("nowhere"),
        "a link to /dev/zero": lambda: file.symlink_to("/dev/zero"),
        "a link to /dev/null": lambda: file.symlink_to("/dev/null"),
        "empty": lambda: file.write_bytes(b""),
        "in an unreadable folder": lambda: file.parent.chmod(0),
        "in a folder that cannot be searched": lambda: file.parent.chmod(0o600),
    }
    way = rng.choice([*ways])
    inside = way.startswith("in ")
    if way != "unreadable" and not inside:
        file.unlink()
    if not inside:
        ways[way]()
    elif "/" in name:
        ways[way]()
        case.locked.append(file.parent)
    else:
        way = "unreadable"
        file.chmod(0)
    inside = inside and way.startswith("in ")
    optional = name.endswith(("tokenizer_config.json", "tokenizer.json")) or name in ("mine.py", "site.yaml")
    wrong = frozenset() if optional or name.startswith("reward/") else ALL if name in _ALWAYS_READ or inside else RUNS
    if name == "template.jinja" and way == "empty":
        wrong = frozenset()
    if way == "removed" and name in (*_DATA, "model/model.safetensors"):
        wrong -= {"submit"}  # a dry run warns of it: another machine may have the file
    case.changed(
        f"{name}: {way}", file.name, *_key_of(name), *([file.parent.name] if "/" in name else []), wrong_for=wrong
    )


def _key_of(name: str) -> tuple[str, ...]:
    return {"mine.py": ("mine",), "template.jinja": ("data.chat_template",), "site.yaml": ("site",)}.get(name, ())


def module(case: Case) -> None:
    """A user's module that is not as it should be."""
    rng = case.rng
    ways: dict[str, tuple[bytes, bool]] = {
        "empty": (b"", True),
        "syntax": (b"def score(:\n", True),
        "NUL": (b"score = 1\0\n", True),
        "not UTF-8": (b"score = '\xff'\n", True),
        "another encoding": (b"# coding: nowhere\nscore = keep = FAMILY = make = 1\n", True),
        "deep": (b"x = " + b"(" * 5000 + b")" * 5000 + b"\n", True),
        "deep operators": (b"score = keep = FAMILY = make = " + b"-" * 50_000 + b"1\n", True),
        "a long sum": (b"score = keep = FAMILY = make = " + b"1+" * 50_000 + b"1\n", True),
        "deep blocks": (b"".join(b" " * depth + b"if 1:\n" for depth in range(200)), True),
        "raises": (b"def score(): pass\ndef keep(): pass\ndef make(): pass\nFAMILY = 1 / 0\n", False),
        "exits": (b"import sys\ndef score(): pass\nkeep = make = FAMILY = score\nsys.exit(3)\n", False),
        "imports nothing": (b"import nowhere\ndef score(): pass\nkeep = make = FAMILY = score\n", False),
        "imports itself": (b"from mine import score\nkeep = make = FAMILY = score\n", False),
        "recursion": (b"def score(): score()\nkeep = make = FAMILY = score\nscore()\n", False),
        "of another type": (b"score = keep = make = FAMILY = 5\n", False),
        "warns": (b"import warnings\nwarnings.warn('x')\nscore = keep = make = FAMILY = '\\d'\n", False),
        "indented": (b"  score = 1\n", True),
        "30,000 lines": (b"score = 1\n" * 30_000, False),
        "10 MB of a text": (b"score = '" + b"x" * 10**7 + b"'\n", False),
    }
    way = rng.choice([*ways])
    content, wrong = ways[way]
    (case.folder / "mine.py").write_bytes(content)
    family = rng.random() < 0.4
    found = config_of()
    if family:
        found["model"]["family"] = "mine:FAMILY"
    if rng.random() < 0.3:
        found["prepare"] = {"function": "mine:make"}
    write_yaml(case.folder / "config.yaml", found)
    wrong_for = ALL if family else RUNS if wrong else frozenset()
    names = ("mine", "family") if family else ("mine.py", "mine")
    case.changed(f"mine.py: {way}{', as a family' if family else ''}", *names, wrong_for=wrong_for)


def option(case: Case) -> None:
    """An option, or the path of the configuration."""
    rng = case.rng
    if rng.random() < 0.4:
        path = rng.choice(
            [path for path in PATHS if "\0" not in path and "\ud800" not in path and path not in ("-", "--check")]
        )
        case.config = path
        case.changed(f"CONFIG {shown(path)}", path[:20], "config", *path.split("/")[-1:], wrong_for=ALL)
        return
    if case.command in RUNS:
        path = rng.choice(
            ("", ".", "/", "/dev/null", "config.yaml", "config.yaml/x", "n" * 300, *LONG[1:2], "model", "a%jb", "a\nb")
        )
        case.arguments += ("--run-dir", path)
        wrong = path in ("/dev/null", "config.yaml", "config.yaml/x") or len(path) > 255
        names = ("run_dir", "--run-dir", path[:20] or "run_dir")
        case.changed(f"--run-dir {shown(path)}", *names, wrong_for=RUNS if wrong else frozenset())
        return
    name = rng.choice(("", "nowhere", "H200", "x" * 5000, "h100\n", "cpu", "0"))
    case.arguments += ("--gpu", name)
    case.changed(f"--gpu {shown(name)}", "--gpu", wrong_for=frozenset() if name == "H200" else ALL)


def clean(case: Case, folder: Path) -> None:
    """Removes the folder of a case."""
    for locked in case.locked:
        locked.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def nothing(case: Case) -> None:
    """No change: the working run, which must be accepted."""
    case.changed("nothing", json.dumps(None))
