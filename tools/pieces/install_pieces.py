"""Joins the pieces that `python -m tools.pieces` wrote, and installs the wheels in them, without network.

    python3 install_pieces.py --target DIR     # or without --target: into the environment of this python3

Needs only pip and the standard library. The pieces may arrive a few at a time, each time with this file and
manifest.json: those that have arrived are verified and stored, and the exit code is 3 until all are there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

EXIT_FAILED = 1  # pip or an import failed
EXIT_REFUSED = 2  # wrong machine for these pieces, or no manifest
EXIT_INCOMPLETE = 3  # pieces are missing or damaged: bring them and run again
_BLOCK = 1 << 20

# Prints a line of JSON per module: its file or the error, and seconds.
_IMPORT = """
import importlib, json, sys, time
folder, modules = sys.argv[1], sys.argv[2:]
if folder:
    sys.path.insert(0, folder)
for name in modules:
    began, row = time.monotonic(), {"module": name}
    try:
        row["file"] = str(getattr(importlib.import_module(name), "__file__", None))
    except BaseException as error:
        row["error"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.monotonic() - began, 2)
    print("\\n" + json.dumps(row), flush=True)
"""


class Stop(Exception):
    """Ends the program with a message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """Print on stderr: stdout is for lines that a shell evaluates."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        install(options)
    except Stop as stop:
        say(f"install_pieces: {stop}")
        return stop.code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, metavar="DIR", help="install into DIR instead of the environment")
    parser.add_argument(
        "--pieces", type=Path, metavar="DIR", help="folder of manifest and pieces; default: that of this file"
    )
    parser.add_argument("--store", type=Path, metavar="DIR", help="folder for pieces between calls")
    parser.add_argument("--no-import-check", action="store_true", help="do not import the installed modules")
    return parser


def install(options: argparse.Namespace) -> None:
    """Verify pieces, store or join them, install the wheels and import modules."""
    source = (options.pieces or Path(__file__).parent).absolute()
    target = options.target.absolute() if options.target else None
    store = (options.store or (Path(f"{target}.pieces") if target else Path(sys.prefix) / "rlhpc-pieces")).absolute()
    manifest, digest = read_manifest(source)
    check_machine(manifest)
    record = {"manifest": digest, "target": str(target) if target else sys.prefix}
    folder = store / digest[:16]  # one folder per set of pieces
    done = folder / "installed.json"
    if is_done(done, record, manifest["wheels"], target):
        say("already installed: nothing to do")
        print_exports(target)
        return
    folder.mkdir(parents=True, exist_ok=True)
    paths = collect(manifest, source, folder)
    warn_of_versions(manifest)
    began = time.monotonic()
    wheels = join(manifest, paths, folder / "wheels")
    joined = time.monotonic()
    run_pip(wheels, target)
    installed = time.monotonic()
    record.update(join_seconds=round(joined - began, 1), install_seconds=round(installed - joined, 1))
    if not options.no_import_check:
        record["imports"] = check_imports(manifest["imports"], target)
    for name in ("wheels", "pieces"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_whole(done, json.dumps(record, indent=2) + "\n")
    say(f"installed {len(wheels)} wheels in {installed - began:.0f} s; {done} has the details")
    print_exports(target)


def read_manifest(source: Path) -> Any:
    """The manifest beside the pieces, and its SHA-256."""
    file = source / "manifest.json"
    try:
        text = file.read_bytes()
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise Stop(EXIT_REFUSED, f"{file}: no manifest: {error}; copy it beside this script") from error
    if manifest.get("format") != 1:
        raise Stop(
            EXIT_REFUSED, f"{file}: format {manifest.get('format')!r}; use the install_pieces.py prepared with it"
        )
    return manifest, hashlib.sha256(text).hexdigest()


def check_machine(manifest: Any) -> None:
    """Refuse a Python or processor that the wheels are not for, and a Python that cannot decompress them."""
    target = manifest["target"]
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if (here, platform.machine()) != (target["python"], target["machine"]):
        mine, theirs = f"{here} on {platform.machine()}", f"{target['python']} on {target['machine']}"
        raise Stop(EXIT_REFUSED, f"the pieces are for Python {theirs}, and {sys.executable} is Python {mine}")
    if manifest["lzma"] and importlib.util.find_spec("_lzma") is None:
        raise Stop(EXIT_REFUSED, f"{sys.executable} was built without lzma; prepare the pieces without --lzma")


def is_done(done: Path, record: dict[str, Any], wheels: list[Any], target: Path | None) -> bool:
    """True if an earlier call installed these pieces there and all packages are still in place."""
    try:
        before = json.loads(done.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if any(before.get(key) != value for key, value in record.items()):
        return False
    found = metadata.distributions(path=[str(target)]) if target else metadata.distributions()
    present = {(canonical(each.metadata["Name"]), each.version) for each in found}
    return all((wheel["name"], wheel["version"]) in present for wheel in wheels)


def canonical(name: str) -> str:
    """Normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def collect(manifest: Any, source: Path, folder: Path) -> list[Path]:
    """Paths of all pieces in order. If some are missing, stores those that have arrived and raises Stop."""
    (stored := folder / "pieces").mkdir(exist_ok=True)
    paths: list[Path] = []
    missing: list[str] = []
    arrived: list[Path] = []
    for piece in manifest["pieces"]:
        found = None
        for place in (stored / Path(piece["file"]).name, source / Path(piece["file"]).name):
            if not place.is_file():
                continue
            if place.stat().st_size == piece["bytes"] and sha256_of(place) == piece["sha256"]:
                found = place
                break
            say(f"install_pieces: {place} is damaged, {place.stat().st_size} of {piece['bytes']} bytes")
        if found is None:
            missing.append(piece["file"])
            continue
        paths.append(found)
        if found.parent != stored:
            arrived.append(found)
    if missing:
        for path in arrived:
            copy_whole(path, stored / path.name)
        count = len(manifest["pieces"])
        there = f"{len(paths)} of {count} pieces are stored in {stored}"
        raise Stop(EXIT_INCOMPLETE, f"{there}; bring {', '.join(missing)} and run again")
    return paths


def join(manifest: Any, paths: list[Path], folder: Path) -> list[Path]:
    """Write the wheels from the pieces in order, and verify each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stream = blocks(paths)
    rest = b""
    wheels = []
    for wheel in manifest["wheels"]:
        path, digest, left = folder / Path(wheel["file"]).name, hashlib.sha256(), wheel["bytes"]
        with path.open("wb") as file:
            while left:
                rest = rest or next(stream, b"")
                if not rest:
                    break
                block, rest = rest[:left], rest[left:]
                file.write(block)
                digest.update(block)
                left -= len(block)
        if digest.hexdigest() != wheel["sha256"]:
            raise Stop(EXIT_FAILED, f"{wheel['file']}: checksum mismatch after joining the pieces; prepare them again")
        wheels.append(path)
    return wheels


def blocks(paths: list[Path]) -> Any:
    """Contents of all files in order, in blocks."""
    for path in paths:
        with path.open("rb") as file:
            while True:
                block = file.read(_BLOCK)
                if not block:
                    break
                yield block


def run_pip(wheels: list[Path], target: Path | None) -> None:
    """Install exactly these wheels, replacing installed ones of the same version, whose contents may differ."""
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", "install"]
    command += ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile", "--force-reinstall"]
    if target:
        command += ["--upgrade", "--target", str(target)]
    done = subprocess.run([*command, *map(str, wheels)], stdout=sys.stderr)
    if done.returncode:
        remedy = "" if target else "; --target DIR needs no write access to the environment"
        raise Stop(EXIT_FAILED, f"pip ended with {done.returncode}{remedy}")


def check_imports(modules: list[str], target: Path | None) -> list[dict[str, Any]]:
    """Import all modules in a new process, and return a row per module for the record."""
    command = [sys.executable, "-c", _IMPORT, str(target or ""), *modules]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=os.path.abspath(os.sep))
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"module"')]
    failed = [f"{row['module']}: {row['error']}" for row in rows if "error" in row]
    if len(rows) < len(modules):
        failed.append(f"{modules[len(rows)]}: the process ended with {done.returncode}")
    for row in rows:
        say(f"import {row['module']}: " + row.get("error", f"works, {row['seconds']} s"))
    if failed:
        raise Stop(EXIT_FAILED, f"installed, but imports fail: {'; '.join(failed)}")
    return rows


def warn_of_versions(manifest: Any) -> None:
    """Warn of packages that the set was resolved against and that are absent here or have another version."""
    for name, version in manifest["expected"].items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "absent"
        if found.partition("+")[0] != version.partition("+")[0]:
            say(f"warning: the set was prepared for {name} {version}; here it is {found}")


def print_exports(target: Path | None) -> None:
    """Print lines for a shell on stdout."""
    if target:
        folder = shlex.quote(str(target))
        print(f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}")
        print(f"export PATH={shlex.quote(str(target / 'bin'))}:$PATH")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for block in blocks([path]):
        digest.update(block)
    return digest.hexdigest()


def copy_whole(source: Path, path: Path) -> None:
    """Copy atomically: an interrupted copy leaves no file under the final name."""
    partial = path.with_name(path.name + ".partial")
    shutil.copyfile(source, partial)
    os.replace(partial, path)


def write_whole(path: Path, text: str) -> None:
    """Write atomically: a reader sees all of the text or none."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
