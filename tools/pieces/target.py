"""Target machine without network: its Python, platform and installed packages, as its pip lists them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlhpc.core.errors import UserError

_INSPECT = "pass the output of `python -m pip inspect` or `python -m pip list --format=json` on the target"
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # glibc 2.N: legacy name of the tag
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}  # oldest glibc with a manylinux tag; 2.17 on other machines


@dataclass(frozen=True)
class Target:
    """Machine that the wheels are for. ``requires`` is known only from ``pip inspect``."""

    python: str = "3.12"
    platform: str = "manylinux_2_39_x86_64"
    packages: Mapping[str, str] = field(default_factory=dict)  # canonical name: version
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # canonical name: its Requires-Dist
    unusable: tuple[str, ...] = ()  # installed packages with versions that no requirement can match

    @property
    def python_tuple(self) -> tuple[int, int]:
        major, minor = self.python.split(".")
        return int(major), int(minor)

    @property
    def machine(self) -> str:
        """Processor architecture, as in ``platform.machine()``."""
        found = _MANYLINUX.fullmatch(self.platform)
        return found[2] if found else self.platform.partition("_")[2]

    def platforms(self) -> list[str]:
        """Platform tags of the machine, most specific first. pip compares them literally."""
        found = _MANYLINUX.fullmatch(self.platform)
        if not found:
            return [self.platform]
        newest, machine = int(found[1]), found[2]
        tags = []
        for glibc in range(newest, _OLDEST_GLIBC.get(machine, 17) - 1, -1):
            tags.append(f"manylinux_2_{glibc}_{machine}")
            if glibc in _ALIASES:
                tags.append(f"{_ALIASES[glibc]}_{machine}")
        return [*tags, f"linux_{machine}"]

    def tags(self) -> list[Tag]:
        """Tags of wheels that pip installs there, most specific first."""
        interpreter = "cp{}{}".format(*self.python_tuple)
        return [
            *cpython_tags(self.python_tuple, abis=[interpreter], platforms=self.platforms()),
            *compatible_tags(self.python_tuple, interpreter=interpreter, platforms=self.platforms()),
        ]

    def environment(self) -> dict[str, str]:
        """Environment markers of the target."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def without(self, names: set[str]) -> Target:
        """The machine without these packages (canonical names)."""
        packages = {name: version for name, version in self.packages.items() if name not in names}
        return Target(self.python, self.platform, packages, self.requires, self.unusable)


def read_target(file: Path, python: str | None = None, platform: str = Target.platform) -> Target:
    """Target from the output of ``pip inspect``, ``pip list --format=json`` or ``pip freeze`` on it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(file), remedy=_INSPECT) from error
    requires: dict[str, tuple[str, ...]] = {}
    if text.lstrip().startswith(("[", "{")):
        document = _json(file, text)
        if isinstance(document, dict):
            python = python or document["environment"]["python_version"]
            requires = dict(_requires(document))
        found = list(_listed(file, document))
    else:
        found = list(_frozen(file, text))
    if not found:
        raise UserError("no packages in it", where=str(file), remedy=_INSPECT)
    python = python or Target.python
    if not re.fullmatch(r"3\.\d+", python):
        raise UserError(f"invalid version of Python: {python!r}", where="--python", remedy="write 3.12, for example")
    packages: dict[str, str] = {}
    unusable = []
    for name, version in found:
        try:
            packages[canonicalize_name(name)] = str(Version(version))
        except InvalidVersion:
            unusable.append(f"{name} {version}")
    return Target(python, platform, packages, requires, tuple(unusable))


def _json(file: Path, text: str) -> Any:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"invalid JSON: {error}", where=str(file), remedy=_INSPECT) from error
    if isinstance(document, dict) and not {"installed", "environment"} <= document.keys():
        raise UserError("JSON without `installed` and `environment`", where=str(file), remedy=_INSPECT)
    return document


def _listed(file: Path, document: Any) -> Iterator[tuple[str, str]]:
    rows = [row["metadata"] for row in document["installed"]] if isinstance(document, dict) else document
    for row in rows:
        if not (isinstance(row, dict) and isinstance(row.get("name"), str) and isinstance(row.get("version"), str)):
            raise UserError(f"entry without name and version: {row!r}", where=str(file), remedy=_INSPECT)
        yield row["name"], row["version"]


def _requires(document: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    for row in document["installed"]:
        yield canonicalize_name(row["metadata"]["name"]), tuple(row["metadata"].get("requires_dist") or ())


def _frozen(file: Path, text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            requirement = Requirement(entry)
            (pin,) = requirement.specifier
        except (InvalidRequirement, ValueError):
            requirement, pin = None, None
        if requirement is None or pin is None or pin.operator not in ("==", "==="):
            raise UserError(f"no version in {entry!r}", where=f"{file}:{number}", remedy=_INSPECT)
        yield requirement.name, pin.version
