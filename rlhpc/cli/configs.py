"""``rlhpc configs``. Imports only click at startup."""

from __future__ import annotations

import re
from pathlib import Path

import click

from rlhpc.cli.completion import complete_configs
from rlhpc.cli.echo import echo
from rlhpc.cli.options import JSON


@click.command()
@click.argument("name", required=False, shell_complete=complete_configs)
@JSON
def configs(*, name: str | None, as_json: bool) -> None:
    """List the configs and job scripts that come with rlhpc, or print the one called NAME.

    In a printed config, paths to shipped files (model descriptions, the schema) are absolute. --json is for the list.
    """
    from rlhpc.cli.json_text import json_text
    from rlhpc.core.errors import UserError, did_you_mean

    files = shipped_files()
    if name is None:
        titles = {shown: _title(file.read_text(encoding="utf-8")) for shown, file in files.items()}
        if as_json:
            listed = [{"name": shown, "title": titles[shown], "file": str(file)} for shown, file in files.items()]
            echo(json_text(listed))
            return
        width = max(map(len, files))
        for shown, title in titles.items():
            echo(f"{shown:<{width}}  {title}")
        return
    if name not in files:
        raise UserError("no shipped config or job script of this name", where=name, remedy=did_you_mean(name, files))
    echo(_with_absolute_paths(files[name].read_text(encoding="utf-8")), nl=False)


def shipped_files() -> dict[str, Path]:
    """Configs (``dapo``) and job scripts (``grpo.sbatch``) by name, in the order of the list."""
    from rlhpc.core.files import shipped

    folder = shipped("configs")
    found = sorted(folder.rglob("*.yaml"), key=lambda file: (file.parent != folder, file))
    scripts = sorted(shipped("sbatch").glob("*.sbatch"))
    return {file.stem: file for file in found} | {file.name: file for file in scripts}


def _title(text: str) -> str:
    """First line of the opening comment, after the lines for editor and shell."""
    lines = (line for line in text.splitlines() if not line.startswith(("# yaml-language-server:", "#!")))
    return next(lines).removeprefix("# ").rstrip(":.")


def _with_absolute_paths(text: str) -> str:
    from rlhpc.core.files import shipped

    folder = shipped("configs")
    text = re.sub(r"(?<=\$schema=)\S+", lambda name: str(folder / name[0].rpartition("/")[2]), text)
    return text.replace("path: configs/", f"path: {folder}/")
