"""The families, by the architecture that ``config.json`` names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.models.deepseek import DEEPSEEK_V3
from rlhpc.models.llama import LLAMA
from rlhpc.models.mixtral import MIXTRAL
from rlhpc.models.qwen2 import QWEN2
from rlhpc.models.qwen3 import QWEN3
from rlhpc.models.qwen3_moe import QWEN3_MOE
from rlhpc.models.shape import ConfigReader, ModelShape
from rlhpc.models.tables import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)}


def read_model(folder: Path) -> ModelShape:
    """The shape of the HuggingFace model in ``folder``."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"no such folder {str(folder)!r}", where="model.path", remedy="give a HuggingFace model folder")
    if not file.is_file():
        raise UserError(
            f"{str(folder)!r} has no config.json", where="model.path", remedy="give a HuggingFace model folder"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"not a JSON document ({error})", where=str(file), remedy="restore the file") from None
    return shape_of(fields, str(file))


def shape_of(fields: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that the fields of a ``config.json`` describe; refuses what no family understands."""
    known = {architecture: family for family in FAMILIES.values() for architecture in family.architectures}
    named = list(fields.get("architectures") or [])
    architecture = next((name for name in named if name in known), None)
    if architecture is None:
        name = named[0] if named else "none"
        raise UserError(f"architecture {name!r} is not supported", where=where, remedy=did_you_mean(name, known))
    reader = ConfigReader(fields, where)
    return known[architecture].read(reader, architecture)
