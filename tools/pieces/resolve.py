"""Finds the wheels that a target lacks.

pip finds the newest wheel for a requirement, the target's Python and its platform. The requirements of that wheel are
walked here: pip cannot resolve against another machine's packages, and evaluates markers for the machine it runs on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from tools.pieces.closure import THIS_COMMAND, Closure, Offer, Unmet, walk
from tools.pieces.target import Target
from tools.pieces.wheels import Wheel

_ROUNDS = 100  # runs of pip: one per level of requirements, and one per version that conflicts with the target
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
_VERSIONS = re.compile(r" \(from versions: [^)]*\)")  # may be hundreds


@dataclass(frozen=True)
class Resolution:
    """Packages to bring, their closure and checksums."""

    offers: dict[str, Offer]  # packages to bring
    closure: Closure
    sha256: dict[str, str]  # of the file that pip chose, if the index gives it


@dataclass
class _Search:
    """State of a resolution: requirements passed to pip, versions found, and versions that conflict with the target."""

    offers: dict[str, Offer]
    sha256: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, Unmet] = field(default_factory=dict)  # canonical name: reason for an older version

    def exclude(self, closure: Closure, target: Target, own: str) -> None:
        """Exclude a version that requires another version of one of the target's packages.

        One package at a time, nearest to the roots, because further conflicts may come only from that version.
        """
        for unmet in closure.unmet:
            name, _, version = unmet.by.partition(" ")
            required = canonicalize_name(Requirement(unmet.requirement).name)
            selected = self.offers.get(name)
            if required in target.packages and name != own and selected is not None and selected.version == version:
                self.excluded[name] = unmet
                return

    def relax(self, name: str, closure: Closure, own: str) -> bool:
        """Resolve requirements of a package that no single version meets: of its requirers, exclude the current version
        of the one farthest from the roots. False if that is impossible."""
        constraints = [(line, by) for line, by in closure.required[name] if line.specifier]
        if len({str(line.specifier) for line, _ in constraints}) < 2:
            return False
        for line, by in reversed(constraints):
            requirer = by.partition(" ")[0]
            if requirer != own and requirer in self.offers and by != THIS_COMMAND:
                others = " and ".join(sorted({f"{other} by {whose}" for other, whose in constraints if whose != by}))
                self.excluded[requirer] = Unmet(by, str(line), f"required {others}")
                del self.offers[requirer]  # and, with it, its requirements
                return True
        return False

    def wanted(self, closure: Closure, own: str) -> dict[str, str]:
        """The merged requirement of each package that is not on the target."""
        wanted = {}
        for name, required in closure.required.items():
            urls = [str(requirement.url) for requirement, _ in required if requirement.url]
            specifiers = [str(requirement.specifier) for requirement, _ in required]
            if name in self.excluded:
                specifiers.append(f"<{self.excluded[name].by.partition(' ')[2]}")
            merged = SpecifierSet(",".join(filter(None, specifiers)))
            if name != own:
                wanted[name] = f"{name} @ {urls[0]}" if urls else f"{name}{merged}"
        return wanted


def resolve(
    own: Wheel, extras: str, bring: Sequence[str], target: Target, left_out: Collection[str], folder: Path
) -> Resolution:
    """Packages that ``own[extras]`` and ``bring`` need and the target lacks. ``folder``: for temporary files."""
    roots = [f"{own.name}[{extras}]" if extras else own.name, *bring]
    search = _Search({own.name: Offer(own.name, own.version, own.requires)})
    for _ in range(_ROUNDS):
        closure = walk(roots, search.offers, target, left_out)
        search.exclude(closure, target, own.name)
        wanted = search.wanted(closure, own.name)
        changed = {name: text for name, text in wanted.items() if search.asked.get(name) != text}
        if not changed:
            return Resolution({name: search.offers[name] for name in closure.needed}, closure, search.sha256)
        if _find(search, changed, closure, target, folder):
            search.asked.update(changed)
    raise UserError(f"no complete set after {_ROUNDS} runs of pip", remedy="name versions with --bring NAME==VERSION")


def _find(search: _Search, wanted: Mapping[str, str], closure: Closure, target: Target, folder: Path) -> bool:
    """Let pip choose a wheel per requirement. False if a requirer needs another version first."""
    report = folder / "report.json"
    command = [*_PIP, "install", "--dry-run", "--ignore-installed", "--no-deps", f"--target={folder / 'nowhere'}"]
    errors = _pip([*command, *_platform_options(target), f"--report={report}", *wanted.values()])
    if errors:
        failed = [name for name, text in wanted.items() if text in errors]
        if failed and search.relax(failed[0], closure, canonicalize_name("rlhpc")):
            return False
        causes = [f"{by} requires {line}" for name in failed for line, by in closure.required[name]]
        causes += [str(search.excluded[name]) for name in failed if name in search.excluded]
        _refuse(errors, causes, target)
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        metadata: Any = item["metadata"]
        name = canonicalize_name(metadata["name"])
        search.offers[name] = Offer(name, metadata["version"], tuple(metadata.get("requires_dist") or ()))
        digest = (item["download_info"].get("archive_info") or {}).get("hashes", {}).get("sha256")
        search.sha256.pop(name, None)
        if digest:
            search.sha256[name] = digest
    return True


def download(resolution: Resolution, target: Target, folder: Path, but: str) -> None:
    """Download the wheels of the resolution, except that of package ``but``, to ``folder``."""
    pins = [f"{offer.name}=={offer.version}" for offer in resolution.offers.values() if offer.name != but]
    if pins:
        errors = _pip([*_PIP, "download", "--no-deps", f"--dest={folder}", *_platform_options(target), *pins])
        if errors:
            _refuse(errors, [], target)


def _platform_options(target: Target) -> list[str]:
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}"]
    return [*options, *(f"--platform={platform}" for platform in target.platforms())]


def _pip(command: Sequence[str]) -> str:
    """Run pip and return its errors in one line, empty if there are none."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    if "No module named pip" in done.stderr:
        raise UserError("pip is not installed", where=sys.executable, remedy="install it: python -m ensurepip")
    lines = [line.removeprefix("ERROR:").strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    lines = [_VERSIONS.sub("", line) for line in lines if not line.startswith("No matching distribution")]
    return "; ".join(lines) or done.stderr[-500:] or f"exit code {done.returncode}"


def _refuse(errors: str, causes: Sequence[str], target: Target) -> None:
    raise UserError(
        "; ".join([f"pip finds no wheel for Python {target.python} on {target.platform}: {errors}", *causes]),
        remedy="name another version with --bring, or the package in --replace or --leave-out",
    )
