"""Reports known vulnerabilities of the locked versions, as OSV lists them.

    python -m tools.audit [--index URL]    # make audit

Exit code 1 if a finding is not in requirements/judged.toml, with its reason; 0 if the index does not answer, which is
reported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tomllib
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlhpc.core.errors import EXIT_USER_ERROR, UserError, did_you_mean
from tools.lock_files import FOLDER, LOCKS, TORCH_CUDA, read
from tools.locks import ROOT

INDEX = "https://api.osv.dev"
JUDGED = "judged.toml"
_MOST_QUERIES = 1000  # of one request to OSV
_SECONDS = 60.0
_KEYS = {"id", "package", "reason"}


@dataclass(frozen=True)
class Package:
    """A locked version; a local label such as +cpu does not count."""

    name: str
    version: str
    file: str  # the first lock with it

    @property
    def query(self) -> dict[str, Any]:
        return {"package": {"name": self.name, "ecosystem": "PyPI"}, "version": self.version}


@dataclass(frozen=True)
class Finding:
    """A vulnerability of a locked version, by its identifier in OSV."""

    package: Package
    identifier: str

    def __str__(self) -> str:
        package = self.package
        return f"{FOLDER}/{package.file}: {package.name}=={package.version}: https://osv.dev/{self.identifier}"


def locked(root: Path) -> list[Package]:
    """Every version of the lock files, once."""
    found: dict[tuple[str, str], Package] = {}
    for file in (*(lock.file for lock in LOCKS), TORCH_CUDA):
        for pin in read(root, file):
            version = Version(pin.version or "0").public
            found.setdefault((pin.name, version), Package(pin.name, version, file))
    return list(found.values())


def judged(root: Path) -> dict[tuple[str, str], str]:
    """(identifier, package) of the accepted findings, to their reason."""
    path = root / FOLDER / JUDGED
    accepted = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("finding", []):
        unknown = next(iter(sorted(entry.keys() - _KEYS)), None)
        if unknown is not None:
            raise UserError(f"unknown key {unknown!r}", where=f"{path}", remedy=did_you_mean(unknown, _KEYS))
        lacking = sorted(key for key in _KEYS if not str(entry.get(key, "")).strip())
        if lacking:
            raise UserError(f"a finding without {lacking[0]}", where=f"{path}", remedy=f"add {lacking[0]} to it")
        accepted[entry["id"], entry["package"]] = entry["reason"]
    return accepted


def findings(packages: Sequence[Package], index: str) -> list[Finding]:
    """Vulnerabilities that the index lists for these versions. OSError or ValueError if its answer is not OSV's."""
    found, queries = [], [(package, package.query) for package in packages]
    while queries:
        now, queries = queries[:_MOST_QUERIES], queries[_MOST_QUERIES:]
        results = _ask(index, [query for _, query in now])
        for (package, query), result in zip(now, results, strict=True):
            found += [Finding(package, entry["id"]) for entry in result.get("vulns", [])]
            if token := result.get("next_page_token"):
                queries.append((package, {**query, "page_token": token}))
    return found


def _ask(index: str, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{index}/v1/querybatch",
        data=json.dumps({"queries": queries}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        results = json.load(answer)["results"]
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise ValueError("the answer is not OSV's")
    return results


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.audit", description=__doc__.partition("\n")[0])
    parser.add_argument("--index", default=INDEX, metavar="URL", help=f"OSV, or a mirror of it ({INDEX})")
    options = parser.parse_args(arguments)
    packages = locked(root)
    try:
        accepted = judged(root)
        found = findings(packages, options.index)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        print(f"audit: no answer from {options.index} ({error}): {len(packages)} locked versions are NOT checked")
        return 0
    new = [finding for finding in found if (finding.identifier, finding.package.name) not in accepted]
    gone = accepted.keys() - {(finding.identifier, finding.package.name) for finding in found}
    for finding in new:
        print(f"{finding}; upgrade with `make locks ARGS=--upgrade`, or give a reason in {FOLDER}/{JUDGED}")
    for identifier, name in sorted(gone):
        print(f"{FOLDER}/{JUDGED}: {identifier} of {name} is not listed for the locked version: remove it")
    print(f"audit: {len(packages)} locked versions, {len(found)} findings, {len(found) - len(new)} of them judged")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
