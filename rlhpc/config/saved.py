"""Configurations in a run folder, whose secrets are in one file of mode 0600, and keys in which two of them differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.config import yaml12
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.core.files import read_json, remove, write_atomic
from rlhpc.core.folder import RunFolder
from rlhpc.core.redaction import HIDDEN, hide, is_secret, leaves, restore


def save_config(run: RunFolder, config: RunConfig, file: Path | None = None) -> None:
    """Writes ``config`` to ``file``, by default the run's, and its secrets to the run's own file of them."""
    shown, secrets = hide(config.model_dump(mode="json"))
    if secrets is None:
        remove(run.secrets)
    else:
        write_atomic(run.secrets, json.dumps(secrets, indent=2) + "\n", private=True)
    write_atomic(file or run.config, yaml12.dump(shown))


def with_secrets(data: Any, path: Path, lines: Mapping[str, int]) -> Any:
    """``data``, parsed from a configuration at ``path``, with the secrets that were left out of it.

    They are beside it, or beside the run's own if it is that of an attempt. Raises UserError for one that is not there.
    """
    if not any(isinstance(value, str) and HIDDEN in value for _, value in leaves(data)):
        return data
    for folder in (path.absolute().parent, path.absolute().parent.parent.parent):
        try:
            data = restore(data, read_json(RunFolder(folder).secrets))
        except FileNotFoundError:
            continue
        break
    for key, value in leaves(data):
        if isinstance(value, str) and ((value == HIDDEN and is_secret(key)) or f"://{HIDDEN}@" in value):
            raise UserError(
                f"the value was left out ({HIDDEN}) when this configuration was written, and is not beside it",
                where=f"{path}:{lines.get(key, 1)}: {key}",
                remedy="write it again",
            )
    return data


def differing_keys(first: Any, second: Any, without: Collection[str], key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key in which two configurations differ, as dumped to JSON, with both values. ``without``: keys, and whole
    sections, that do not count; ``key``: that of the sections compared."""
    if key in without:
        return
    if isinstance(first, dict) and isinstance(second, dict):
        for name in {**first, **second}:
            yield from differing_keys(first.get(name), second.get(name), without, f"{key}.{name}" if key else name)
    elif first != second:
        yield key, first, second
