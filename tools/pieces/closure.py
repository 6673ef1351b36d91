"""Walks requirements: which wheels a target needs, and which requirements nothing satisfies."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tools.pieces.target import Target

THIS_COMMAND = "this command"  # as the requirer of the roots


@dataclass(frozen=True)
class Offer:
    """Version of a package that is available to bring."""

    name: str  # canonical
    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unmet:
    """Requirement that neither the set nor the target satisfies. ``found``: the available version, if any."""

    by: str
    requirement: str
    found: str | None = None

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.by} requires {self.requirement}, which is neither in the set nor on the target"
        return f"{self.by} requires {self.requirement}, but there is {self.found}"


@dataclass
class Closure:
    """Result of a walk, by canonical names."""

    needed: list[str] = field(default_factory=list)  # offers in use
    relied_on: dict[str, str] = field(default_factory=dict)  # required packages of the target, with versions
    required: dict[str, list[tuple[Requirement, str]]] = field(
        default_factory=dict
    )  # for packages not on the target: requirement and requirer
    left_out: list[str] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)


def walk(roots: Sequence[str], offers: Mapping[str, Offer], target: Target, left_out: Collection[str] = ()) -> Closure:
    """Everything that ``roots`` need on the target. An offer takes precedence over a package of the target.

    Requirements of the target's packages count as satisfied, except those of extras that the set requires. A root that
    is also left out is brought, but not checked against others' requirements.
    """
    closure, seen = Closure(), set()
    queue = deque((Requirement(root), THIS_COMMAND) for root in roots)
    while queue:
        requirement, by = queue.popleft()
        name = canonicalize_name(requirement.name)
        if (name, str(requirement), by) in seen:
            continue
        seen.add((name, str(requirement), by))
        if name in left_out and by != THIS_COMMAND:
            _append(closure.left_out, name)
            continue
        if name in offers or name not in target.packages:
            closure.required.setdefault(name, []).append((requirement, by))
        if name in offers:
            offer = offers[name]
            _append(closure.needed, name)
            _compare(closure, requirement, by, offer.name, offer.version)
            active = requirements_of(offer.requires, requirement.extras, target)
            queue.extend((found, f"{offer.name} {offer.version}") for found in active)
        elif name in target.packages:
            closure.relied_on[name] = target.packages[name]
            _compare(closure, requirement, by, name, target.packages[name])
            known = target.requires.get(name, ())
            plain = {str(line) for line in requirements_of(known, (), target)}
            active = [line for line in requirements_of(known, requirement.extras, target) if str(line) not in plain]
            queue.extend((found, f"{name} {target.packages[name]}") for found in active)
        else:
            closure.unmet.append(Unmet(by, str(requirement)))
    return closure


def requirements_of(lines: Iterable[str], extras: Collection[str], target: Target) -> list[Requirement]:
    """Requirements among Requires-Dist lines that apply on the target with these extras."""
    active = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # from before PEP 508; pip refuses it too
            continue
        environments = [{**target.environment(), "extra": extra} for extra in ("", *sorted(extras))]
        if requirement.marker is None or any(requirement.marker.evaluate(values) for values in environments):
            requirement.marker = None
            active.append(requirement)
    return active


def broken_on_target(offers: Iterable[Offer], target: Target) -> list[str]:
    """Requirements of the target's own packages that a version in the set would break."""
    versions = {offer.name: offer.version for offer in offers}
    broken = []
    for name, lines in target.requires.items():
        if name in versions:
            continue
        for requirement in requirements_of(lines, (), target):
            version = versions.get(canonicalize_name(requirement.name))
            if version is not None and not requirement.specifier.contains(version, prereleases=True):
                broken.append(f"{name} on the target requires {requirement}, and the set brings {version}")
    return broken


def _compare(closure: Closure, requirement: Requirement, by: str, name: str, version: str) -> None:
    if not requirement.specifier.contains(version, prereleases=True):
        closure.unmet.append(Unmet(by, str(requirement), f"{name} {version}"))


def _append(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)
