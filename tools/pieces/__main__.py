"""Brings rlhpc to a machine without network: ``python -m tools.pieces OUT --packages FILE`` (README.md here)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.core.errors import EXIT_USER_ERROR, UserError
from tools.pieces.prepare import Prepared, PrepareOptions, prepare
from tools.pieces.target import read_target

_MB = 1e6


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.pieces", description=__doc__)
    add = made.add_argument
    add("out", type=Path, help="folder for the pieces, a manifest and an installer")
    add("--packages", type=Path, required=True, metavar="FILE", help="output of `pip inspect` on the target")
    add("--platform", metavar="TAG", default="manylinux_2_39_x86_64", help="platform of the target (%(default)s)")
    add("--extras", metavar="NAMES", default="gpu", help="extras of rlhpc (%(default)s)")
    for option, metavar, text in (
        ("--bring", "REQUIREMENT", "bring this package too, or this version of it"),
        ("--replace", "NAMES", "packages that may replace the target's version"),
        ("--leave-out", "NAMES", "packages to neither bring nor check"),
        ("--trim", "NAME:USES", "what to leave out: vllm:hopper,offline,bf16,dense, or globs"),
    ):
        add(option, metavar=metavar, action="append", default=[], help=text)
    add("--lzma", action="store_true", help="recompress large files: takes minutes, saves up to half")
    add("--piece-mb", type=float, default=60.0, metavar="MB", help="size of a piece in 10^6 bytes (%(default)g)")
    add("--no-import-check", action="store_true", help="skip the test import from the wheels")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        options = PrepareOptions(
            target=read_target(given.packages, given.platform),
            extras=given.extras,
            bring=tuple(given.bring),
            left_out=tuple(given.leave_out),
            replace=tuple(given.replace),
            trims=tuple(given.trim),
            lzma=given.lzma,
            piece_mb=given.piece_mb,
            import_check=not given.no_import_check,
        )
        prepared = prepare(options, given.out)
    except UserError as error:
        print(f"pieces: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print("\n".join(summary(prepared, given.out)))
    return 0


def summary(prepared: Prepared, out: Path) -> list[str]:
    """Lines: wheels by size, omitted files and packages, results of the checks, pieces, and the next step."""
    manifest = prepared.manifest
    wheels = sorted(manifest["wheels"], key=lambda wheel: -wheel["bytes"])
    lines = [f"{wheel['bytes'] / _MB:8.2f} MB  {wheel['name']} {wheel['version']}" for wheel in wheels]
    for trimmed in manifest["trimmed"]:
        packed, unpacked = trimmed["packed_bytes"] / _MB, trimmed["unpacked_bytes"] / _MB
        files, name = trimmed["files"], trimmed["name"]
        lines.append(f"trimmed {name}: {files} files, {packed:.1f} MB packed, {unpacked:.1f} MB unpacked left out:")
        lines += [f"  {glob}" for glob in trimmed["globs"]]
    if manifest["left_out"]:
        lines.append(f"left out: {', '.join(manifest['left_out'])}")
    lines.append(f"used as they are on the target: {', '.join(manifest['expected']) or 'none'}")
    lines.append("complete: every requirement is in the set or on the target")
    lines += prepared.checks
    total = sum(piece["bytes"] for piece in manifest["pieces"])
    lines.append(f"{out}: {len(wheels)} wheels, {total / _MB:.1f} MB in {len(manifest['pieces'])} pieces")
    lines.append("on the target: python3 install_pieces.py --target DIR, beside manifest.json and the pieces")
    return lines


if __name__ == "__main__":
    sys.exit(main())
