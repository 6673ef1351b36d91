"""``rlhpc pieces``: brings rlhpc to a machine without network. Imports click only; the rest when a command runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from rlhpc.cli.echo import echo
from rlhpc.cli.json_text import json_text
from rlhpc.cli.options import JSON, grouped

_FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class _Target:
    """Options that describe the target machine."""

    packages: Path
    python: str | None
    platform: str


@dataclass(frozen=True)
class _Choice:
    """Options on what to bring, and how."""

    extras: str
    bring: tuple[str, ...]
    replace: tuple[str, ...]
    leave_out: tuple[str, ...]
    trim: tuple[str, ...]
    lzma: bool
    piece_mb: float
    no_import_check: bool


@click.group()
def pieces() -> None:
    """Bring rlhpc and its wheels to a machine without network."""


@pieces.command()
@click.argument("out", type=_FILE)
@click.option(
    "--packages", type=_FILE, required=True, metavar="FILE", help="Output of pip inspect, list or freeze on the target."
)
@click.option("--python", metavar="3.N", help="Python version of the target; default: from pip inspect, else 3.12.")
@click.option(
    "--platform",
    metavar="TAG",
    default="manylinux_2_39_x86_64",
    help="Platform of the target; default: glibc 2.39, x86_64.",
)
@click.option("--extras", metavar="NAMES", default="gpu", help="Extras of rlhpc; default: gpu.")
@click.option("--bring", multiple=True, metavar="REQUIREMENT", help="Bring this package too, or this version of it.")
@click.option("--replace", multiple=True, metavar="NAMES", help="Packages that may replace the target's version.")
@click.option("--leave-out", multiple=True, metavar="NAMES", help="Packages to neither bring nor check.")
@click.option(
    "--trim", multiple=True, metavar="NAME:USES", help="What to leave out: vllm:hopper,offline,bf16,dense, or globs."
)
@click.option("--lzma", is_flag=True, help="Recompress large files: takes minutes, saves up to half.")
@click.option("--piece-mb", type=float, default=60.0, metavar="MB", help="Size of a piece in 10^6 bytes; default: 60.")
@click.option("--no-import-check", is_flag=True, help="Skip the test import from the wheels.")
@JSON
@grouped(target=_Target, choice=_Choice)
def prepare(*, out: Path, target: _Target, choice: _Choice, as_json: bool) -> None:
    """Write what the target lacks to the folder OUT.

    OUT gets wheels in pieces, a manifest and an installer.
    """
    from rlhpc.site.pieces.prepare import PrepareOptions
    from rlhpc.site.pieces.prepare import prepare as prepare_pieces
    from rlhpc.site.pieces.summary import summary, summary_json
    from rlhpc.site.pieces.target import read_target

    options = PrepareOptions(
        target=read_target(target.packages, target.python, target.platform),
        extras=choice.extras,
        bring=choice.bring,
        left_out=choice.leave_out,
        replace=choice.replace,
        trims=choice.trim,
        lzma=choice.lzma,
        piece_mb=choice.piece_mb,
        import_check=not choice.no_import_check,
    )
    prepared = prepare_pieces(options, out)
    echo(json_text(summary_json(prepared, out)) if as_json else "\n".join(summary(prepared, out)))
