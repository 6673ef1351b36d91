"""Finds the site file and lays its values under a run's configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlhpc.config import yaml12
from rlhpc.config.familiar import FIXED
from rlhpc.config.site import SiteFigures, SiteFile
from rlhpc.core import env
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.inputs import read_input
from rlhpc.core.redaction import hide
from rlhpc.core.storage import exists


@dataclass(frozen=True)
class SiteValues:
    """The site file of a configuration. ``keys`` are those that the configuration takes from it, dotted, with the line
    of the file that each is in."""

    path: Path
    keys: Mapping[str, int]

    @property
    def text(self) -> str:
        """The file, and the keys of the run's own sections that come from it."""
        own = [key for key in self.keys if not key.startswith("site.")]
        sections = dict.fromkeys(".".join(key.split(".")[:2]) for key in self.keys if key.startswith("site."))
        return f"{self.path}: {', '.join([*own, *sections]) or 'nothing, all its keys are set in the run'}"


def take_site(data: dict[str, Any]) -> SiteValues | None:
    """Adds to ``data``, a configuration as parsed, what the site file has and it lacks; None if there is no file.

    ``site.file`` is null afterwards, so that the merged configuration depends on no other file. Raises UserError.
    """
    section = expand_site(data)
    if section is None:
        return None
    if not isinstance(section.get("file", ""), str | None):
        return None
    path, given_by = _find(section)
    section["file"] = None
    if path is None:
        return None
    found, lines = _read(path, given_by)
    _drop_unused_container(found, data)
    taken: dict[str, int] = {}
    for name, value in found.items():
        inside = name in SiteFigures.model_fields
        target, prefix = (section, "site.") if inside else (data, "")
        taken |= {f"{prefix}{key}": lines.get(key, 1) for key in _lay_under(target, name, value)}
    return SiteValues(path, taken)


def expand_site(data: dict[str, Any]) -> dict[str, Any] | None:
    """The section ``site`` of ``data``, made from a path or null; None for any other kind, which the schema reports."""
    value = data.setdefault("site", {})
    if value is None or isinstance(value, str):
        value = data["site"] = {"file": value}
    return value if isinstance(value, dict) else None


def json_schema() -> str:
    """The JSON schema of the site file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SiteFile.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _find(section: Mapping[str, Any]) -> tuple[Path | None, str]:
    """The file and what names it. An empty RLHPC_SITE stands for none."""
    if "file" in section:
        return (Path(section["file"]) if section["file"] is not None else None), "site"
    if (variable := os.environ.get(env.RLHPC_SITE)) is not None:
        return (Path(variable) if variable else None), env.RLHPC_SITE
    base = os.environ.get(env.XDG_CONFIG_HOME) or ""
    path = (Path(base) if Path(base).is_absolute() else Path("~/.config").expanduser()) / "rlhpc" / "site.yaml"
    return (path if exists(path) else None), "its permissions"


def _read(path: Path, given_by: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's keys and values, checked, and the line of each key."""
    try:
        text = read_input(path).decode()
    except UserError as error:
        raise UserError(f"site file {error.message}", where=str(path), remedy=f"correct {given_by}") from None
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UserError(f"site file cannot be read ({error})", where=str(path), remedy=f"correct {given_by}") from None
    document = yaml12.read(text, str(path))
    data, lines = document.value or {}, document.lines
    if not isinstance(data, dict):
        raise UserError("site file has no keys", where=str(path), remedy="see `rlhpc configs site`")
    try:
        SiteFile.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _fault(error.errors(include_url=False, include_context=False)[0], path, lines) from None
    return data, lines


def _fault(detail: ErrorDetails, path: Path, lines: Mapping[str, int]) -> UserError:
    parts = [str(part) for part in detail["loc"]]
    known = [key for key in (".".join(parts[:count]) for count in range(len(parts), 0, -1)) if key in lines]
    key = ".".join(parts) if detail["type"] == "extra_forbidden" else (known or [".".join(parts)])[0]
    where = f"{path}:{lines[known[0]]}: {key}" if known else f"{path}: {key}"
    if detail["type"] != "extra_forbidden":
        return UserError(f"{hide(detail['input'], key)[0]!r} is not allowed ({detail['msg']})", where=where)
    if fixed := FIXED.get(f"site.{key}"):
        return UserError(f"no longer a key: {fixed}", where=where, remedy="leave it out")
    return UserError("unknown key", where=where, remedy=did_you_mean(parts[-1], _keys_beside(parts)))


def _keys_beside(parts: Sequence[str]) -> list[str]:
    """The keys that the section around the last of ``parts`` may have."""
    section: type[BaseModel] = SiteFile
    names = [part for place, part in enumerate(parts[:-1]) if place != 1 or parts[0] != "gpus"]  # not a GPU's own name
    for name in names:
        annotation = section.model_fields[name].annotation
        kinds = (annotation, *getattr(annotation, "__args__", ()))
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(section.model_fields)


def _lay_under(target: dict[str, Any], name: str, value: Any) -> Iterator[str]:
    """Sets ``target[name]`` where it is absent, and inside it key by key; yields the dotted keys that were set."""
    if name not in target:
        target[name] = value if not isinstance(value, dict) else {}
        if not isinstance(value, dict):
            yield name
    if isinstance(value, dict) and isinstance(target[name], dict):
        for key, item in value.items():
            yield from (f"{name}.{inner}" for inner in _lay_under(target[name], str(key), item))


def _drop_unused_container(found: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Leaves out how to run a container where neither the site file nor the run names an image."""
    slurm, mine = found.get("slurm"), data.get("slurm")
    container = slurm.get("container") if isinstance(slurm, dict) else None
    wanted = isinstance(mine, dict) and mine.get("container") is not None
    if isinstance(slurm, dict) and isinstance(container, dict) and "image" not in container and not wanted:
        del slurm["container"]
