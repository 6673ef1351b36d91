"""The libraries of trackers lower no version that another package of the lock needs, and lack none themselves."""

from __future__ import annotations

import contextlib
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhpc.plan.checks.observe import MODULES
from tools.lock_files import ENGINE, FOLDER, read
from tools.locks import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
LOCKED = {  # on this machine
    canonicalize_name(pin.name): pin
    for pin in read(ROOT, "cpu.lock")
    if pin.requirement.marker is None or pin.requirement.marker.evaluate()
}


def needed(name: str) -> list[Requirement]:
    """Requirements of an installed package on this machine, without those of its extras."""
    found = map(Requirement, requires(name) or [])
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_each_tracker_is_an_extra_whose_packages_the_lock_has(extra: str) -> None:
    """What `pip check` would report of them after `make venv`."""
    left, seen = [Requirement(line) for line in EXTRAS[extra]], set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        assert name in LOCKED, f"{extra} needs {one}"
        locked = LOCKED[name].version
        assert one.specifier.contains(locked, prereleases=True), f"{extra} needs {one}, the lock has {locked}"
        if name not in seen:
            seen.add(name)
            left += needed(name)
    assert seen


def test_no_locked_package_needs_another_version_than_the_lock_has() -> None:
    """As `pip check` reports it; packages of the CPU engine are installed without their requirements."""
    engine = (ROOT / FOLDER / ENGINE).read_text(encoding="utf-8")
    wrong = []
    for name in sorted(LOCKED):
        with contextlib.suppress(PackageNotFoundError):  # of another platform
            for one in needed(name) if name not in engine else ():
                pin = LOCKED.get(canonicalize_name(one.name))
                if pin is not None and not one.specifier.contains(pin.version, prereleases=True):
                    wrong.append(f"{name} needs {one}, the lock has {pin.version}")
    assert not wrong
