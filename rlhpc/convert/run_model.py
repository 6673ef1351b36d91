"""The model that a checkpoint's run began with: its folder, and the fields of its config.json as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError
from rlhpc.models import has_dynamic_rope
from rlhpc.models.fixed_rope import fix_fields


def model_folder(home: Path, checkpoint: Path) -> Path:
    """Folder of the config of a checkpoint's model: its own, or the model that its run's config names."""
    for folder in (home, checkpoint):
        if (folder / "config.json").is_file():
            return folder
    run = _run_of(checkpoint)
    if run is None:
        raise UserError(
            "no config.json, and no config.yaml of a run in the folders above",
            where=str(checkpoint),
            remedy="pass the HuggingFace folder of the model, or that training started from, as --model",
        )
    folder = Path(str(_keys(run)["path"]))
    for base in (Path.cwd(), *run.parents):
        if (base / folder / "config.json").is_file():
            return base / folder
    raise UserError(
        f"the model {str(folder)!r} that the run started from does not exist",
        where=str(run / "config.yaml"),
        remedy="pass its folder as --model",
    )


def as_trained(fields: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The fields of config.json with dynamic RoPE as the checkpoint's run has fixed it (model.rope_tokens)."""
    run = _run_of(checkpoint) if has_dynamic_rope(fields) else None
    tokens = None if run is None else _keys(run).get("rope_tokens")
    return fields if tokens is None else fix_fields(fields, int(tokens))


def _run_of(checkpoint: Path) -> Path | None:
    """Folder of the run that wrote the checkpoint."""
    return next((folder for folder in checkpoint.absolute().parents if (folder / "config.yaml").is_file()), None)


def _keys(run: Path) -> dict[str, Any]:
    """The section model of a run's configuration."""
    from rlhpc.config import yaml12

    file = run / "config.yaml"
    section: dict[str, Any] = yaml12.parse(file.read_text(encoding="utf-8"), str(file))["model"]
    return section
