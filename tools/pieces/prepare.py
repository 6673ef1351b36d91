"""Prepares a folder of pieces for a machine without network: resolves, downloads, trims, checks and cuts wheels."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from rlhpc.core.redaction import redact
from rlhpc.core.shown import show
from tools.pieces import install_pieces
from tools.pieces.closure import Closure, Offer, broken_on_target, walk
from tools.pieces.resolve import Resolution, download, resolve
from tools.pieces.target import Target
from tools.pieces.wheels import (
    MANIFEST,
    Trim,
    Trimmed,
    Wheel,
    has_large_files,
    pack_rlhpc,
    parse_trims,
    path_files,
    read_wheel,
    sha256_of,
    trim,
    write_manifest,
    write_pieces,
)

# Modules imported on the target after installation; for vLLM, the one that an in-process engine uses.
_IMPORTS = {"rlhpc": "rlhpc.cli.main", "megatron-core": "megatron.core", "vllm": "vllm.entrypoints.llm"}
_MB = 1_000_000

MODULES = {"rlhpc": ("rlhpc.cli.main", "rlhpc.trainer.build"), "megatron-core": ("megatron.core",)}

# Prints one line of JSON at the end: the error of the import and the missing module, if any.
_CODE = """
import importlib, json, sys
folder, module = sys.argv[1:]
sys.path.insert(0, folder)
result = {"error": None, "lacks": None}
try:
    file = importlib.import_module(module).__file__ or ""
    if not file.startswith(folder):
        result["error"] = f"is imported from {file}"
except Exception as error:
    result["error"] = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        result["lacks"] = error.name
print(json.dumps(result))
"""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of the command. Package names in any spelling; an option may list several, separated by commas."""

    target: Target
    extras: str = "gpu"
    bring: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    trims: tuple[str, ...] = ()
    lzma: bool = False
    piece_mb: float = 60.0
    import_check: bool = True


@dataclass(frozen=True)
class Prepared:
    """The written manifest, and a line per check."""

    manifest: dict[str, Any]
    checks: list[str]


def prepare(options: PrepareOptions, out: Path) -> Prepared:
    """Write manifest, installer and pieces to ``out``. Nothing is written there unless the set is complete."""
    trims = parse_trims(options.trims)
    _check_options(options)
    _check_destination(out)
    left_out = _names(options.left_out)
    target = options.target.without(_names((*options.replace, "rlhpc")))
    with _scratch(out) as folder:
        (wheels := folder / "wheels").mkdir()
        _fetch(options, target, left_out, trims, folder)
        trimmed = _repack(trims, wheels, folder, lzma=options.lzma)
        brought = [read_wheel(path) for path in sorted(wheels.glob("*.whl"))]
        closure = check_set(brought, _roots(options), target, left_out)
        offers = [Offer(wheel.name, wheel.version) for wheel in brought]
        checks = [*_notes(closure, brought, target), *broken_on_target(offers, target)]
        if options.import_check:
            (unpacked := folder / "unpacked").mkdir()
            checks += check_imports(brought, target, unpacked)
        (ready := folder / "ready").mkdir()
        pieces = write_pieces(brought, ready, int(options.piece_mb * _MB))
        manifest = write_manifest(ready, _fields(options, closure, trimmed), brought, pieces)
        shutil.copyfile(install_pieces.__file__, ready / "install_pieces.py")
        _replace(ready, out)
    return Prepared(manifest, checks)


def _fetch(options: PrepareOptions, target: Target, left_out: set[str], trims: Sequence[Trim], folder: Path) -> None:
    """Resolve and download into ``<folder>/wheels``."""
    own = pack_rlhpc(folder / "wheels")
    _say(f"resolving for Python {target.python} on {target.platform}: {len(target.packages)} packages installed there")
    resolution = resolve(own, options.extras, options.bring, target, left_out, folder)
    _refuse(resolution.closure)
    for one in trims:
        if one.name not in resolution.offers:
            raise UserError(f"{one.name!r} is not in the set", where="--trim", remedy="remove the option")
    _say(f"downloading {len(resolution.offers) - 1} wheels")
    download(resolution, target, folder / "wheels", but=own.name)
    _check_downloaded(resolution, folder / "wheels")


def check_set(wheels: Sequence[Wheel], roots: Sequence[str], target: Target, left_out: set[str]) -> Closure:
    """Closure of the wheels on disk. Raises UserError unless the set or the target satisfies every requirement."""
    tags = set(target.tags())
    for wheel in wheels:
        if not wheel.tags & tags:
            raise UserError(f"is not for Python {target.python} on {target.platform}", where=wheel.path.name)
    offers = {wheel.name: Offer(wheel.name, wheel.version, wheel.requires) for wheel in wheels}
    closure = walk(roots, offers, target, left_out)
    _refuse(closure)
    return closure


def _roots(options: PrepareOptions) -> list[str]:
    return [f"rlhpc[{options.extras}]" if options.extras else "rlhpc", *options.bring]


def _names(texts: Sequence[str]) -> set[str]:
    """Canonical names from options, each of which may list several."""
    return {canonicalize_name(name.strip()) for text in texts for name in text.split(",")}


def _check_options(options: PrepareOptions) -> None:
    if options.piece_mb * _MB < 1:
        raise UserError(f"{options.piece_mb:g} MB is too small", where="--piece-mb", remedy="use 60, for example")
    for text in options.bring:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{text!r}: {reason}", where="--bring", remedy="write NAME or NAME==VERSION") from error


def _check_destination(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError("is a file", where=str(out), remedy="name a new folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError("not empty, and has no earlier set of pieces", where=str(out), remedy="name a new folder")


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out``, on the same file system."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as folder:
        yield Path(folder).resolve()


def _refuse(closure: Closure) -> None:
    if closure.unmet:
        raise UserError(
            f"the set is incomplete: {'; '.join(map(str, closure.unmet))}",
            remedy="add packages with --bring, allow other versions with --replace, or skip packages with --leave-out",
        )


def _check_downloaded(resolution: Resolution, folder: Path) -> None:
    wheels = {wheel.name: wheel for wheel in map(read_wheel, folder.glob("*.whl"))}
    for name, offer in resolution.offers.items():
        found = wheels.get(name)
        if found is None or found.version != offer.version:
            raise RuntimeError(f"pip downloaded no {name} {offer.version}")
        expected = resolution.sha256.get(name)
        if expected and sha256_of(found.path) != expected:
            raise UserError("differs from the resolved file", where=found.path.name, remedy="prepare again")


def _repack(trims: Sequence[Trim], wheels: Path, folder: Path, *, lzma: bool) -> list[Trimmed]:
    """Trim wheels in place and, with ``lzma``, recompress their large files."""
    (repacked := folder / "repacked").mkdir()
    globs = {one.name: one.globs for one in trims}
    results = []
    for wheel in map(read_wheel, sorted(wheels.glob("*.whl"))):
        if wheel.name in globs or (lzma and has_large_files(wheel.path)):
            _say(f"repacking {wheel.name}")
            results.append(trim(wheel.path, globs.get(wheel.name, ()), repacked, lzma=lzma))
            (repacked / wheel.path.name).replace(wheel.path)
    return [result for result in results if result.files]


def _notes(closure: Closure, wheels: Sequence[Wheel], target: Target) -> list[str]:
    notes = [f"{name} on the target: version not understood, treated as absent" for name in target.unusable]
    for wheel in wheels:
        for file in path_files(wheel.path):
            notes.append(f"{wheel.path.name} has {file}, which Python ignores after --target")
    return notes


def _fields(options: PrepareOptions, closure: Closure, trimmed: Sequence[Trimmed]) -> dict[str, Any]:
    target = options.target
    present = {*closure.needed, *closure.relied_on}
    return {
        "target": {"python": target.python, "platform": target.platform, "machine": target.machine},
        "roots": [redact(root) for root in _roots(options)],
        "expected": dict(sorted(closure.relied_on.items())),
        "left_out": sorted({*closure.left_out} - {*closure.needed}),
        "lzma": options.lzma,
        "trimmed": [asdict(one) for one in trimmed],
        "imports": [module for name, module in _IMPORTS.items() if name in present],
    }


def _replace(ready: Path, out: Path) -> None:
    """Move the finished files to ``out``, replacing an earlier set. The manifest comes last."""
    out.mkdir(exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    for earlier in out.glob("piece-*-of-*"):
        earlier.unlink()
    for file in sorted(ready.iterdir(), key=lambda file: file.name == MANIFEST):
        file.replace(out / file.name)


def _say(text: str) -> None:
    show(f"rlhpc: {text}")


# ---- imports from the wheels, as far as this machine has their dependencies


def check_imports(wheels: Sequence[Wheel], target: Target, folder: Path) -> list[str]:
    """One line per import, checked or not. Raises UserError if an import fails because of the wheels."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if (here, platform.system(), platform.machine()) != (target.python, "Linux", target.machine):
        mine = f"Python {here} on {platform.system()} {platform.machine()}"
        return [f"imports not checked: this is {mine}, the target Python {target.python} on Linux {target.machine}"]
    for wheel in wheels:
        with zipfile.ZipFile(wheel.path) as archive:
            archive.extractall(folder)
    names = {wheel.name for wheel in wheels}
    modules = [module for name, listed in MODULES.items() if name in names for module in listed]
    return [_check(module, target, folder) for module in modules]


def _check(module: str, target: Target, folder: Path) -> str:
    command = [sys.executable, "-c", _CODE, str(folder), module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        result = {"error": f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}", "lacks": None}
    if result["error"] is None:
        return f"import {module}: works"
    missing = (result["lacks"] or "").partition(".")[0]
    if missing and not (folder / missing).exists() and canonicalize_name(missing) in target.packages:
        return f"import {module}: not checked beyond {missing}, which the target has and this machine lacks"
    raise UserError(
        f"cannot be imported from the wheels: {result['error']}",
        where=module,
        remedy="bring the missing module with --bring, or pass --no-import-check",
    )
