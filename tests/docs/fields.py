"""Fields of the commands' JSON, as docs/scripting.md names them."""

from __future__ import annotations

import re
from typing import Any

from tests.docs.pages import DOCS

PAGE = DOCS / "scripting.md"


def sections() -> dict[str, dict[str, bool]]:
    """For each heading its fields, and whether each is always there."""
    found: dict[str, dict[str, bool]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            fields = found.setdefault(line.removeprefix("### "), {})
        elif (row := re.match(r"- (\*?)`([^`]+)`\*?: ", line)) and found:
            fields[row[2]] = not row[1]
    return found


SECTIONS = sections()


def differences(fields: dict[str, bool], value: Any) -> set[str]:
    """Fields that are documented and not there, and those that are there and not documented."""
    missing = {name for name, always in fields.items() if always}
    found, seen = set(), {""}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, list):
            seen.add(f"{path}[]") if value else None
            for one in value:
                walk(one, f"{path}[]")
        elif isinstance(value, dict) and any(name.startswith(f"{path}.".lstrip(".")) for name in fields):
            seen.add(path)
            for name, one in value.items():
                walk_field(f"{path}.{name}".lstrip("."), one, path)

    def walk_field(path: str, value: Any, parent: str) -> None:
        beginning = f"{parent}.".lstrip(".")
        wild = [name for name in fields if re.fullmatch(re.escape(beginning) + r"[A-Z]+(\..*)?", name)]
        if path not in fields and wild:
            path = beginning + wild[0].removeprefix(beginning).partition(".")[0]
        elif path not in fields:
            found.add(path)
            return
        missing.discard(path)
        walk(value, path)

    walk(value, "")
    return found | {name for name in missing if parent_of(name) in seen}


def parent_of(field: str) -> str:
    """The object that a field is of, if it is not a list's own element."""
    return field.rpartition(".")[0]
