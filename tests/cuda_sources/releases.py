"""Python sources of vLLM's CUDA releases: the releases that the pins allow, and their ``*.py`` in a cache.

``python -m tests.cuda_sources.releases`` fetches all of them, ``… 0.25.0 0.32.0`` those. A wheel has 250 MB and more,
its Python sources 30; only these are kept, in ``$XDG_CACHE_HOME/rlhpc/vllm-sources`` (``~/.cache`` by default). pip
downloads the wheels, from the index that it is configured for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.tiers.imports import ROOT

# The oldest release that is supported, and the one whose CPU build the tests run: those that CI checks.
CI_RELEASES = ("0.25.0", "0.32.0")


class Unreachable(Exception):
    """The package index does not answer, or lacks the release."""


def pinned(root: Path = ROOT) -> SpecifierSet:
    """The vLLM releases that the extra ``gpu`` of pyproject.toml allows."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = map(Requirement, project["optional-dependencies"]["gpu"])
    return next(one.specifier for one in requirements if one.name == "vllm")


def allowed(published: Sequence[str], pins: SpecifierSet) -> list[str]:
    """Of the published releases those that the pins allow, oldest first; no pre-releases."""
    return [str(version) for version in sorted(map(Version, published)) if pins.contains(version, prereleases=False)]


def published() -> list[str]:
    """All releases of vLLM that the index has for this Python. Raises Unreachable."""
    done = _pip("index", "versions", "vllm", seconds=60)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.M)
    if done.returncode or found is None:
        raise Unreachable(f"pip cannot list the releases of vllm: {_last_line(done.stderr)}")
    return found[1].split(", ")


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhpc" / "vllm-sources"


def cached(pins: SpecifierSet | None = None) -> list[str]:
    """Releases whose sources are in the cache, oldest first."""
    return allowed([file.parents[1].name for file in cache().glob("[0-9]*/vllm/__init__.py")], pins or pinned())


def fetch(release: str, seconds: float = 900) -> Path:
    """Folder with the sources of a release, downloaded unless the cache has them. Raises Unreachable."""
    folder = cache() / release
    if (folder / "vllm" / "__init__.py").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as name:
        wheels, sources = Path(name, "wheels"), Path(name, "sources")
        done = _pip(
            *("download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off"),
            *(f"--dest={wheels}", f"vllm=={release}"),
            seconds=seconds,
        )
        found = list(wheels.glob("vllm-*.whl"))
        if done.returncode or not found:
            raise Unreachable(f"pip cannot download vllm {release}: {_last_line(done.stderr)}")
        keep_python(found[0], sources)
        shutil.rmtree(folder, ignore_errors=True)
        sources.rename(folder)
    return folder


def keep_python(wheel: Path, folder: Path) -> None:
    """Unpack the ``*.py`` of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])


def _pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    options = ("--disable-pip-version-check", "--retries=1", "--timeout=20")
    command = [sys.executable, "-m", "pip", *arguments, *options]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {seconds:.0f} s")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def main(releases: Sequence[str]) -> int:
    try:
        for release in releases or allowed(published(), pinned()):
            print(f"{release}: {fetch(release)}", flush=True)
    except Unreachable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
