"""Lock files in requirements/: their entries, and whether they are what pyproject.toml and cpu-engine.txt ask for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

OWN = "rlhpc"
FOLDER = "requirements"
ENGINE = "cpu-engine.txt"
TORCH_CPU = "torch-cpu.lock"  # hashes of the wheels in PyTorch's CPU index
TORCH_CUDA = "torch-cuda.lock"  # what PyPI's torch needs besides cpu.lock
COMMAND = "run `make locks`"
_SHA256 = re.compile(r"--hash=sha256:([0-9a-f]{64})(?: \\)?")
_VIA = re.compile(r" +# +(?:via\b *)?(.*)")


@dataclass(frozen=True)
class Lock:
    """A lock file and the requirements that it answers."""

    file: str
    extras: tuple[str, ...]
    engine: bool = False  # with the packages of cpu-engine.txt

    def asked(self, root: Path) -> list[Requirement]:
        """Direct requirements: of the package with these extras, of its build, and of the CPU engine."""
        pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        extras = pyproject["project"]["optional-dependencies"]
        lines = [*pyproject["project"]["dependencies"], *pyproject["build-system"]["requires"]]
        for extra in self.extras:
            lines += extras[extra]
        if self.engine:
            engine = (root / FOLDER / ENGINE).read_text(encoding="utf-8").splitlines()
            lines += [line for line in engine if line and not line.startswith("#")]
        found = []
        asked = list(map(Requirement, lines))
        while asked:
            requirement = asked.pop(0)
            if requirement.name == OWN:
                asked[:0] = [Requirement(line) for extra in sorted(requirement.extras) for line in extras[extra]]
            else:
                found.append(requirement)
        return found


_INSTALLED = ("cpu", "dev", "mlflow", "study", "torchao", "wandb")  # by `make venv`
LOCKS = (Lock("login.lock", ()), Lock("cpu.lock", _INSTALLED, engine=True), Lock("gpu.lock", ("gpu",)))


@dataclass(frozen=True)
class Pin:
    """An entry: a package, its version, and the hashes of the files that pip may install for it."""

    requirement: Requirement
    hashes: tuple[str, ...]
    via: tuple[str, ...]  # what requires it
    faults: tuple[str, ...]  # lines of the entry that are neither hashes nor comments

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str | None:
        """The exact version; None if the entry has a range."""
        specifiers = list(self.requirement.specifier)
        exact = len(specifiers) == 1 and specifiers[0].operator == "==" and not specifiers[0].version.endswith(".*")
        return specifiers[0].version if exact else None

    @property
    def line(self) -> str:
        """The entry without its hashes."""
        return f"{self.requirement}"


def parse(text: str) -> list[Pin]:
    """Entries of a lock file as uv writes it. Options of pip are skipped."""
    entries: list[list[str]] = []
    for line in text.splitlines():
        if line[:1].isspace() and entries:
            entries[-1].append(line)
        elif line and not line.startswith(("#", "--")):
            entries.append([line])
    return [_pin(lines) for lines in entries]


def _pin(lines: list[str]) -> Pin:
    hashes, via, faults = [], [], []
    for line in lines[1:]:
        if match := _SHA256.fullmatch(line.strip()):
            hashes.append(match[1])
        elif match := _VIA.fullmatch(line):
            via += [match[1]] if match[1] else []
        else:
            faults.append(line.strip())
    return Pin(Requirement(lines[0].removesuffix("\\")), tuple(hashes), tuple(via), tuple(faults))


def read(root: Path, file: str) -> list[Pin]:
    path = root / FOLDER / file
    return parse(path.read_text(encoding="utf-8")) if path.is_file() else []


def problems(root: Path) -> list[str]:
    """One line for each thing that is wrong with the lock files; no network, nothing installed."""
    found = []
    for lock in LOCKS:
        pins = read(root, lock.file)
        if not pins:
            found.append(f"{FOLDER}/{lock.file}: missing or empty; {COMMAND}")
            continue
        found += [f"{FOLDER}/{lock.file}: {fault}; {COMMAND}" for fault in _faults(pins, lock.asked(root))]
    torch = {TORCH_CPU: _cpu_builds, TORCH_CUDA: _cuda_libraries}
    for file, faults in torch.items():
        own = _entry_faults(read(root, file)) if read(root, file) else ["missing or empty"]
        found += [f"{FOLDER}/{file}: {fault}; {COMMAND}" for fault in [*own, *faults(root)]]
    return [*found, *(f"{FOLDER}/login.lock: {fault}; {COMMAND}" for fault in _different(root))]


def _faults(pins: list[Pin], asked: list[Requirement]) -> Iterator[str]:
    yield from _entry_faults(pins)
    names = {canonicalize_name(requirement.name) for requirement in asked}
    for requirement in asked:
        own = [pin for pin in pins if pin.name == canonicalize_name(requirement.name)]
        if not own:
            yield f"{requirement.name} is missing, and {requirement} is required"
        for pin in own:
            if pin.version and not requirement.specifier.contains(pin.version, prereleases=True):
                yield f"{pin.line} does not meet {requirement}"
    for pin in pins:
        if f"{OWN} (pyproject.toml)" in pin.via and pin.name not in names:
            yield f"{pin.line} is no longer required by pyproject.toml"


def _entry_faults(pins: list[Pin]) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for pin in pins:
        if pin.version is None:
            yield f"{pin.line} is not an exact version"
        if not pin.hashes:
            yield f"{pin.line} has no hash"
        if pin.faults:
            yield f"{pin.line} has {pin.faults[0]!r}, which is not a SHA-256 hash"
        key = (pin.name, str(pin.requirement.marker))
        if key in seen:
            yield f"{pin.line} is there twice"
        seen.add(key)


def _cpu_builds(root: Path) -> Iterator[str]:
    """Both builds of torch must be in cpu.lock, with one version."""
    torch = [pin for pin in read(root, "cpu.lock") if pin.name == "torch"]
    for build in read(root, TORCH_CPU):
        if [build.version] != [f"{pin.version}+cpu" for pin in torch]:
            yield f"{build.line}, but cpu.lock has {' and '.join(pin.line for pin in torch) or 'no torch'}"
        elif set(build.hashes) - set(torch[0].hashes):
            yield f"cpu.lock lacks hashes of {build.line}"


def _cuda_libraries(root: Path) -> Iterator[str]:
    """The file names the torch that its libraries are for."""
    path = root / FOLDER / TORCH_CUDA
    named = re.findall(r"^#.*\b(torch==[^\s,;]+)", path.read_text(encoding="utf-8") if path.is_file() else "", re.M)
    torch = [pin.line for pin in read(root, "cpu.lock") if pin.name == "torch"]
    if named[:1] != torch:
        yield f"is for {' '.join(named[:1]) or 'no torch'}, but cpu.lock has {' and '.join(torch) or 'no torch'}"


def _different(root: Path) -> Iterator[str]:
    """A login node checks what jobs run: the same versions as cpu.lock."""
    versions: dict[str, set[Version]] = {}
    for pin in read(root, "cpu.lock"):
        versions.setdefault(pin.name, set()).add(Version(pin.version or "0"))
    for pin in read(root, "login.lock"):
        if pin.version and pin.name in versions and Version(pin.version) not in versions[pin.name]:
            yield f"{pin.line}, but cpu.lock has {' and '.join(map(str, sorted(versions[pin.name])))}"
