"""Prepares a folder of pieces for a machine without network: resolve, download, trim, check, cut."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlhpc.core.errors import UserError
from rlhpc.core.shown import show
from rlhpc.site.pieces import install_pieces
from rlhpc.site.pieces.closure import Closure, Offer, broken_on_target, walk
from rlhpc.site.pieces.imports import check_imports
from rlhpc.site.pieces.manifest import MANIFEST, sha256_of, write_manifest, write_pieces
from rlhpc.site.pieces.resolve import Resolution, download, resolve
from rlhpc.site.pieces.target import Target
from rlhpc.site.pieces.trims import Trim, parse_trims
from rlhpc.site.pieces.wheels import Trimmed, Wheel, has_large_files, pack_rlhpc, path_files, read_wheel, trim

# Imported on the target after the installation. The module of vLLM is the one that an engine in the process uses.
_IMPORTS = {"rlhpc": "rlhpc.cli.main", "megatron-core": "megatron.core", "vllm": "vllm.entrypoints.llm"}
_MB = 1_000_000


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, as on the command line. Names of packages in any spelling, several with commas between them."""

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
    """The manifest that was written, and what the checks found."""

    manifest: dict[str, Any]
    checks: list[str]


def prepare(request: PrepareOptions, out: Path) -> Prepared:
    """Write manifest, installer and pieces to ``out``. Nothing is written there unless the set is complete."""
    trims = parse_trims(request.trims)
    _check_request(request)
    _check_destination(out)
    left_out = _names(request.left_out)
    target = request.target.without(_names((*request.replace, "rlhpc")))
    with _scratch(out) as folder:
        (wheels := folder / "wheels").mkdir()
        _fetch(request, target, left_out, trims, folder)
        trimmed = _repack(trims, wheels, folder, lzma=request.lzma)
        brought = [read_wheel(path) for path in sorted(wheels.glob("*.whl"))]
        closure = check_set(brought, _roots(request), target, left_out)
        offers = [Offer(wheel.name, wheel.version) for wheel in brought]
        checks = [*_notes(closure, brought, target), *broken_on_target(offers, target)]
        if request.import_check:
            (unpacked := folder / "unpacked").mkdir()
            checks += check_imports(brought, target, unpacked)
        (ready := folder / "ready").mkdir()
        pieces = write_pieces(brought, ready, int(request.piece_mb * _MB))
        manifest = write_manifest(ready, _fields(request, closure, trimmed), brought, pieces)
        shutil.copyfile(install_pieces.__file__, ready / "install_pieces.py")
        _replace(ready, out)
    return Prepared(manifest, checks)


def _fetch(request: PrepareOptions, target: Target, left_out: set[str], trims: Sequence[Trim], folder: Path) -> None:
    """Resolve and download into ``<folder>/wheels``."""
    own = pack_rlhpc(folder / "wheels")
    _say(f"resolving for Python {target.python} on {target.platform}: {len(target.packages)} packages are there")
    resolution = resolve(own, request.extras, request.bring, target, left_out, folder)
    _refuse(resolution.closure)
    for one in trims:
        if one.name not in resolution.offers:
            raise UserError(f"{one.name!r} is not brought", where="--trim", remedy="leave the option out")
    _say(f"downloading {len(resolution.offers) - 1} wheels")
    download(resolution, target, folder / "wheels", but=own.name)
    _check_downloaded(resolution, folder / "wheels")


def check_set(wheels: Sequence[Wheel], roots: Sequence[str], target: Target, left_out: set[str]) -> Closure:
    """Requirements of the wheels as they are on disk: refused unless the set or the target satisfies each."""
    tags = set(target.tags())
    for wheel in wheels:
        if not wheel.tags & tags:
            python, platform = target.python, target.platform
            raise UserError(f"is not for Python {python} on {platform}", where=wheel.path.name)
    offers = {wheel.name: Offer(wheel.name, wheel.version, wheel.requires) for wheel in wheels}
    closure = walk(roots, offers, target, left_out)
    _refuse(closure)
    return closure


def _roots(request: PrepareOptions) -> list[str]:
    return [f"rlhpc[{request.extras}]" if request.extras else "rlhpc", *request.bring]


def _names(texts: Sequence[str]) -> set[str]:
    """Canonical names out of options, each of which may list several."""
    return {canonicalize_name(name.strip()) for text in texts for name in text.split(",")}


def _check_request(request: PrepareOptions) -> None:
    if request.piece_mb * _MB < 1:
        raise UserError(f"{request.piece_mb:g} MB is no size", where="--piece-mb", remedy="use 60, for example")
    for text in request.bring:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{text!r}: {reason}", where="--bring", remedy="write NAME or NAME==VERSION") from error


def _check_destination(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError("is a file", where=str(out), remedy="name a new folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError("is not empty and holds no earlier set of pieces", where=str(out), remedy="name a new folder")


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder beside ``out``, on the same file system, that is gone afterwards."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as folder:
        yield Path(folder).resolve()


def _refuse(closure: Closure) -> None:
    if closure.unmet:
        raise UserError(
            f"the set is incomplete: {'; '.join(map(str, closure.unmet))}",
            remedy="bring it with --bring, take another version with --replace, or do without by --leave-out",
        )


def _check_downloaded(resolution: Resolution, folder: Path) -> None:
    wheels = {wheel.name: wheel for wheel in map(read_wheel, folder.glob("*.whl"))}
    for name, offer in resolution.offers.items():
        found = wheels.get(name)
        if found is None or found.version != offer.version:
            raise RuntimeError(f"pip downloaded no {name} {offer.version}")
        expected = resolution.sha256.get(name)
        if expected and sha256_of(found.path) != expected:
            raise UserError("is not the file that was resolved", where=found.path.name, remedy="prepare again")


def _repack(trims: Sequence[Trim], wheels: Path, folder: Path, *, lzma: bool) -> list[Trimmed]:
    """Trim wheels in place, and compress their large files again if asked."""
    (repacked := folder / "repacked").mkdir()
    globs = {one.name: one.globs for one in trims}
    results = []
    for wheel in map(read_wheel, sorted(wheels.glob("*.whl"))):
        if wheel.name in globs or (lzma and has_large_files(wheel.path)):
            _say(f"packing {wheel.name} again")
            results.append(trim(wheel.path, globs.get(wheel.name, ()), repacked, lzma=lzma))
            (repacked / wheel.path.name).replace(wheel.path)
    return [result for result in results if result.files]


def _notes(closure: Closure, wheels: Sequence[Wheel], target: Target) -> list[str]:
    notes = [f"{name} on the target: version not understood, treated as absent" for name in target.unusable]
    notes += [
        f"{extra} not checked: pass the output of `pip inspect` to have it checked" for extra in closure.unchecked
    ]
    for wheel in wheels:
        for file in path_files(wheel.path):
            notes.append(f"{wheel.path.name} has {file}, which Python ignores after --target")
    return notes


def _fields(request: PrepareOptions, closure: Closure, trimmed: Sequence[Trimmed]) -> dict[str, Any]:
    target = request.target
    present = {*closure.needed, *closure.relied_on}
    return {
        "target": {"python": target.python, "platform": target.platform, "machine": target.machine},
        "roots": _roots(request),
        "expected": dict(sorted(closure.relied_on.items())),
        "left_out": sorted({*closure.left_out} - {*closure.needed}),
        "lzma": request.lzma,
        "trimmed": [asdict(one) for one in trimmed],
        "imports": [module for name, module in _IMPORTS.items() if name in present],
    }


def _replace(ready: Path, out: Path) -> None:
    """Move the finished files to ``out``, in place of those of an earlier set. The manifest comes last."""
    out.mkdir(exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)
    for earlier in out.glob("piece-*-of-*"):
        earlier.unlink()
    for file in sorted(ready.iterdir(), key=lambda file: file.name == MANIFEST):
        file.replace(out / file.name)


def _say(text: str) -> None:
    show(f"rlhpc: {text}")
