"""``rlhpc pieces``: brings rlhpc to a machine without network. Imports only click at startup."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(path_type=Path)


@click.group()
def pieces() -> None:
    """Bring rlhpc and its dependencies to a machine without network."""


@pieces.command()
@click.argument("out", type=_FILE)
@click.option(
    "--packages", type=_FILE, required=True, metavar="FILE", help="Output of pip inspect, list or freeze on the target."
)
@click.option("--python", metavar="3.N", help="Python on the target; default: that of pip inspect, or 3.12.")
@click.option(
    "--platform", metavar="TAG", default="manylinux_2_39_x86_64", help="Platform with its glibc; default: 2.39, x86_64."
)
@click.option("--extras", metavar="NAMES", default="gpu", help="Extras of rlhpc to bring; default: gpu.")
@click.option("--bring", multiple=True, metavar="REQUIREMENT", help="Also bring this package, or this version of it.")
@click.option("--replace", multiple=True, metavar="NAMES", help="Allow versions other than the target's.")
@click.option("--leave-out", multiple=True, metavar="NAMES", help="Neither bring nor check these packages.")
@click.option("--trim", multiple=True, metavar="NAME:USES", help="vllm:hopper,offline,bf16,dense, or globs of files.")
@click.option("--lzma", is_flag=True, help="Recompress large files: takes minutes, saves up to half.")
@click.option("--piece-mb", type=float, default=60.0, metavar="MB", help="Largest piece, in 10^6 bytes; default: 60.")
@click.option("--no-import-check", is_flag=True, help="Do not import from the wheels on this machine.")
def prepare(
    out: Path,
    packages: Path,
    python: str | None,
    platform: str,
    extras: str,
    bring: tuple[str, ...],
    replace: tuple[str, ...],
    leave_out: tuple[str, ...],
    trim: tuple[str, ...],
    lzma: bool,
    piece_mb: float,
    no_import_check: bool,
) -> None:
    """Write what the target lacks to the folder OUT: wheels in pieces, a manifest and an installer."""
    from rlhpc.site.pieces.prepare import PrepareOptions
    from rlhpc.site.pieces.prepare import prepare as prepare_pieces
    from rlhpc.site.pieces.summary import summary
    from rlhpc.site.pieces.target import read_target

    target = read_target(packages, python, platform)
    options = PrepareOptions(target, extras, bring, leave_out, replace, trim, lzma, piece_mb, not no_import_check)
    for line in summary(prepare_pieces(options, out), out):
        click.echo(line)
