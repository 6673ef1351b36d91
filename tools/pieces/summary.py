"""Summary of a preparation for the terminal."""

from __future__ import annotations

from pathlib import Path

from tools.pieces.prepare import Prepared

_MB = 1e6


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
