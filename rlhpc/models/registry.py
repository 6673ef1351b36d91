"""Finds the family of a model by the architecture in its ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.imports import import_attribute
from rlhpc.core.inputs import read_json_object
from rlhpc.models.config_reader import ConfigReader, UnknownArchitecture
from rlhpc.models.deepseek import DEEPSEEK_V3
from rlhpc.models.describe import architectures
from rlhpc.models.llama import LLAMA
from rlhpc.models.mixtral import MIXTRAL
from rlhpc.models.qwen2 import QWEN2
from rlhpc.models.qwen3 import QWEN3
from rlhpc.models.qwen3_moe import QWEN3_MOE
from rlhpc.models.rope import fix_fields
from rlhpc.models.shape import ModelShape, read_dense
from rlhpc.models.tables import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)}


def find_family(name: str) -> Family:
    """Returns a built-in family by its name, or a user's own by ``package.module:attribute``."""
    if name in FAMILIES:
        return FAMILIES[name]
    family = import_attribute(name, where="model.family")
    if not isinstance(family, Family):
        raise UserError(
            f"{name!r} is a {type(family).__name__}",
            where="model.family",
            remedy="name a value of type rlhpc.models.Family",
        )
    return family


def read_config(folder: Path, rope_tokens: int | None = None) -> dict[str, Any]:
    """Returns the fields of the ``config.json`` of a HuggingFace model folder. ``rope_tokens``: tokens at which dynamic
    RoPE is fixed (rlhpc.models.rope); None: it is left as it is."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"no such folder {str(folder)!r}", where="model.path", remedy="give a HuggingFace model folder")
    if not file.is_file():
        raise UserError(
            f"{str(folder)!r} has no config.json", where="model.path", remedy="give a HuggingFace model folder"
        )
    fields = read_json_object(file, remedy="restore the file")
    return fields if rope_tokens is None else fix_fields(fields, rope_tokens)


def read_model(
    folder: Path, family: str | None = None, *, classifier: bool = False, rope_tokens: int | None = None
) -> ModelShape:
    """Returns the shape of the HuggingFace model in ``folder``. ``family``: see ``find_family``; None: by its config.

    ``classifier``: also accept a sequence classifier, whose transformer is the same. ``rope_tokens``: see
    ``read_config``.
    """
    fields, file = read_config(folder, rope_tokens), folder / "config.json"
    if classifier:
        named = [name.replace("ForSequenceClassification", "ForCausalLM") for name in architectures(fields, str(file))]
        fields = {**fields, "architectures": named}
    return shape_of(fields, str(file), family)


@lru_cache(maxsize=8)
def value_shape(folder: Path) -> ModelShape:
    """Returns the shape of the model in ``folder`` with a value head; cached, because a search needs it per layout."""
    return read_model(folder, classifier=True).with_value_head


def shape_of(fields: Mapping[str, Any], where: str = "config.json", family: str | None = None) -> ModelShape:
    """Returns the shape that the fields of a ``config.json`` describe. Raises UserError for fields that the family does
    not know.

    ``ModelShape.family`` is as ``find_family`` takes it, so that it means the same in every process.
    """
    names = [family] if family is not None else list(FAMILIES)
    known = {architecture: name for name in names for architecture in find_family(name).architectures}
    named = architectures(fields, where)
    architecture = next((name for name in named if name in known), None)
    if architecture is None:
        name, of_family = (named[0] if named else "none"), f" by {family}" if family else ""
        remedy = did_you_mean(name, known) if family else _instead(name, known, fields)
        raise UnknownArchitecture(f"architecture {name!r} is not supported{of_family}", where=where, remedy=remedy)
    found = known[architecture]
    return replace(find_family(found).read(ConfigReader(fields, where), architecture), family=found)


class _SharedReader(ConfigReader):
    """Reads the fields that Llama-like families share; others may be there."""

    def refuse_unread(self) -> None:
        pass


def _instead(name: str, known: Iterable[str], fields: Mapping[str, Any]) -> str:
    """Remedy for an unknown architecture: the page on own families if its fields are Llama's."""
    if not name.endswith("ForCausalLM"):
        return did_you_mean(name, known)
    with suppress(UserError):
        read_dense(_SharedReader(fields, ""), "", name)
        return 'if it computes like Llama, add it in one file: docs/models.md, "A family of your own"'
    return f"use a model of one of {', '.join(sorted(known))}"
