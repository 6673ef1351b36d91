"""Finds the wheels that a target lacks, by pip's own resolver.

pip can resolve for another Python and platform, but not against another machine's packages, so each of these becomes an
empty wheel of the same version, preferred to any on the index. pip also evaluates environment markers for the machine
that it runs on. The walk in ``closure.py`` evaluates them for the target; what it misses is added, and pip runs again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from rlhpc.core.shown import show
from rlhpc.pieces.closure import Closure, Offer, walk
from rlhpc.pieces.target import Target
from rlhpc.pieces.wheels import Wheel, write_wheel

_ROUNDS = 8  # of pip; each adds what only the target's markers ask for
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Resolution:
    """Packages to bring and where pip finds them."""

    offers: dict[str, Offer]  # those to bring alone
    closure: Closure
    sha256: dict[str, str] = field(default_factory=dict)  # of the file that pip chose, where its index names it


def resolve(
    own: Wheel, extras: str, bring: Sequence[str], target: Target, left_out: Collection[str], folder: Path
) -> Resolution:
    """Packages that ``own[extras]`` and ``bring`` need on the target and that it lacks. ``folder`` is for scratch."""
    stubs = folder / "stubs"
    stubs.mkdir()
    constraints = _write_stubs(stubs, target, left_out)
    roots = [f"{own.name}[{extras}]" if extras else own.name, *bring]
    asked = [f"{own.path}[{extras}]" if extras else str(own.path), *bring]
    for _ in range(_ROUNDS):
        report = _report(asked, target, stubs, constraints, folder / "report.json")
        resolution = _read_report(report, roots, target, left_out, stubs)
        missing = [unmet.requirement for unmet in resolution.closure.unmet if unmet.found is None]
        if not missing:
            return resolution
        asked = [*asked, *missing]
    raise UserError(f"no complete set after {_ROUNDS} runs of pip: {'; '.join(map(str, resolution.closure.unmet))}")


def _write_stubs(folder: Path, target: Target, left_out: Collection[str]) -> Path:
    """An empty wheel for each package of the target, and the constraint that no other version is taken."""
    tag = target.tags()[0]
    pins = []
    for name, version in target.packages.items():
        if name in left_out:
            continue
        stem = f"{name.replace('-', '_')}-{version}"
        # An extra's requirements are known from `pip inspect` alone; plain ones are satisfied on the target.
        lines = [line for line in target.requires.get(name, ()) if "extra" in line.partition(";")[2]]
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {line}\n" for line in lines)
        wheel = f"Wheel-Version: 1.0\nGenerator: rlhpc\nRoot-Is-Purelib: false\nTag: {tag}\n"
        files = [(f"{stem}.dist-info/METADATA", metadata.encode()), (f"{stem}.dist-info/WHEEL", wheel.encode())]
        # The best tag and a high build number win over a wheel of the same version on the index.
        write_wheel(folder, f"{stem}-999999-{tag}", files)
        pins.append(f"{name}=={version}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(pins), encoding="utf-8")
    return constraints


def _platform_options(target: Target) -> list[str]:
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}"]
    return [*options, *(f"--platform={platform}" for platform in target.platforms())]


def _report(asked: Sequence[str], target: Target, stubs: Path, constraints: Path, report: Path) -> Any:
    command = [*_PIP, "install", "--quiet", "--dry-run", "--ignore-installed", f"--target={stubs / 'nowhere'}"]
    command += [*_platform_options(target), f"--find-links={stubs}", f"--constraint={constraints}"]
    _pip([*command, f"--report={report}", *asked], "found no set of wheels", target)
    return json.loads(report.read_text(encoding="utf-8"))


def _pip(command: Sequence[str], failure: str, target: Target) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise UserError("has no pip", where=sys.executable, remedy="install it: python -m ensurepip")
    show(done.stdout + done.stderr, file=sys.stderr)
    errors = [line.removeprefix("ERROR:") for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    raise UserError(
        f"pip {failure} for Python {target.python} on {target.platform}: {' '.join(errors[-2:])}",
        remedy="if the target's version of a package is in the way, name it in --replace or --leave-out",
    )


def _read_report(
    report: Any, roots: Sequence[str], target: Target, left_out: Collection[str], stubs: Path
) -> Resolution:
    offers, sha256 = {}, {}
    for item in report["install"]:
        metadata, source = item["metadata"], item["download_info"]
        if source["url"].startswith(stubs.resolve().as_uri()):
            continue
        name = canonicalize_name(metadata["name"])
        offers[name] = Offer(name, metadata["version"], tuple(metadata.get("requires_dist") or ()))
        digest = (source.get("archive_info") or {}).get("hashes", {}).get("sha256")
        if digest:
            sha256[name] = digest
    closure = walk(roots, offers, target, left_out)
    return Resolution({name: offers[name] for name in closure.needed}, closure, sha256)


def download(resolution: Resolution, target: Target, folder: Path, but: str) -> None:
    """Download the wheels of the resolution, all but the one of package ``but``, into ``folder``."""
    pins = [f"{offer.name}=={offer.version}" for offer in resolution.offers.values() if offer.name != but]
    if pins:
        command = [*_PIP, "download", "--quiet", "--no-deps", f"--dest={folder}", *_platform_options(target)]
        _pip([*command, *pins], "could not download the wheels", target)
