"""Target machine without network: its Python, platform and installed packages, as `pip inspect` lists them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlhpc.core.errors import UserError

_MANYLINUX = re.compile(r"manylinux_2_(\d+)_(\w+)")
_ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # glibc 2.N: legacy name of the tag
_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}  # oldest glibc with a manylinux tag; 2.17 on other machines


@dataclass(frozen=True)
class Target:
    """Machine that the wheels are for."""

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


def read_target(file: Path, platform: str = Target.platform) -> Target:
    """Target from the output of ``pip inspect`` on it."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        python = document["environment"]["python_version"]
        rows = [row["metadata"] for row in document["installed"]]
        listed = [(canonicalize_name(row["name"]), row["version"], row.get("requires_dist") or ()) for row in rows]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"not the output of pip inspect: {type(error).__name__}: {error}"
        raise UserError(reason, where=str(file), remedy="run `python -m pip inspect` on the target") from error
    packages: dict[str, str] = {}
    unusable = []
    for name, version, _ in listed:
        try:
            packages[name] = str(Version(version))
        except InvalidVersion:
            unusable.append(f"{name} {version}")
    return Target(python, platform, packages, {name: tuple(lines) for name, _, lines in listed}, tuple(unusable))
