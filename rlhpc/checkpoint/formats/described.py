"""Describes the model in a HuggingFace folder, of a known family or any other.

It reads the config and the headers of the weights. A run's back end decides what the description must have. Model types
of the installed transformers come from its sources, because importing it would import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

from rlhpc.checkpoint.formats.safetensors_headers import read_header, weight_files
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import (
    ModelDescription,
    ModelShape,
    TensorHeader,
    UnknownArchitecture,
    UnsupportedByFamily,
    describe_fields,
    read_config,
    read_model,
)
from rlhpc.sharding.placement import Backend, backend_for

_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
_USE_FSDP = "train.backend fsdp"

# Of version 5 and of older ones.
_MAPPINGS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")


def resolve_model(config: RunConfig, folder: Path | None = None, *, classifier: bool = False) -> ModelDescription:
    """The actor's model, or the one in ``folder``, as the run's back end needs it: a ModelShape for megatron.

    With train.backend auto, the actor's model decides. Raises UserError. ``classifier``: see ``read_model``.
    """
    actor = folder is None
    folder, family = folder or config.model.path, config.model.family if actor else None
    if config.train.backend == "megatron" or not (actor or _may_be_any(config)):
        try:
            return read_model(folder, family, classifier=classifier, rope_tokens=config.model.rope_tokens)
        except UnsupportedByFamily as error:
            remedy = f"{error.remedy}, or use {_USE_FSDP}" if error.remedy else f"use {_USE_FSDP}"
            raise UnsupportedByFamily(error.message, where=error.where, remedy=remedy) from None
    return describe_model(
        folder,
        family,
        classifier=classifier,
        weights=config.model.weights if actor else None,
        trusted=config.model.trust_remote_code,
        rope_tokens=config.model.rope_tokens,
    )


def resolve_value_model(config: RunConfig, folder: Path) -> ModelDescription:
    """The model in ``folder`` with a value head, as the run's back end needs it."""
    return resolve_model(config, folder, classifier=True).with_value_head


def resolve_backend(config: RunConfig) -> Backend:
    """The run's back end; for auto, the actor's model must be there."""
    return backend_for(config, None if config.train.backend != "auto" else resolve_model(config))


def _may_be_any(config: RunConfig) -> bool:
    """True if models beside the actor may be of unknown families."""
    if config.train.backend == "fsdp":
        return True
    try:
        return backend_for(config, resolve_model(config)) == "fsdp"
    except UserError:
        return True  # the actor's model may be absent, or is refused by itself


def describe_model(
    folder: Path,
    family: str | None = None,
    *,
    classifier: bool = False,
    weights: Path | None = None,
    trusted: bool = False,
    rope_tokens: int | None = None,
) -> ModelDescription:
    """Describes the model in ``folder``: a ModelShape if a family knows it, or if ``family`` names one.

    ``weights``: a folder with the weights, if they are elsewhere. ``trusted``: code of the folder may be executed.
    ``rope_tokens``: see ``read_config``.
    """
    folders = (folder,) if weights is None else (folder, weights)
    return _described(folder, weights, _Reading(family, classifier, trusted, rope_tokens), _stamps(folders))


@dataclass(frozen=True)
class _Reading:
    """Options for reading a folder; see ``describe_model``."""

    family: str | None
    classifier: bool
    trusted: bool
    rope_tokens: int | None


@lru_cache(maxsize=32)
def _described(folder: Path, weights: Path | None, reading: _Reading, stamps: object) -> ModelDescription:
    """Cached, because a search over layouts asks for each; ``stamps`` change with the files."""
    family, rope_tokens = reading.family, reading.rope_tokens
    try:
        return read_model(folder, family, classifier=reading.classifier, rope_tokens=rope_tokens)
    except UnsupportedByFamily as error:
        if family is not None:
            raise
        refused = error
    try:
        return _by_files(folder, weights, reading)
    except UserError:
        if not isinstance(refused, UnknownArchitecture):
            raise refused from None  # names the feature
        raise


def _by_files(folder: Path, weights: Path | None, reading: _Reading) -> ModelDescription:
    """The description of a model of any architecture."""
    fields, where = read_config(folder, reading.rope_tokens), str(folder / "config.json")
    model_type = fields.get("model_type")
    if "auto_map" in fields and not reading.trusted and has_model_type(str(model_type)) is False:
        raise UserError(
            f"transformers has no model type {str(model_type)[:80]!r}, and the folder has code of its own (auto_map)",
            where=where,
            remedy="use a model that transformers has, or set model.trust_remote_code to true",
        )
    places = [place for place in (folder, weights) if place is not None and _has_safetensors(place)]
    tensors = read_tensors(places[0]) if places else ()
    return describe_fields(fields, where, tensors, classifier=reading.classifier)


def read_tensors(folder: Path) -> tuple[TensorHeader, ...]:
    """Name, shape and type of each tensor in the safetensors files of a folder. Raises UserError."""
    return tuple(
        TensorHeader(name, entry.shape, entry.dtype)
        for file in weight_files(folder)
        for name, entry in read_header(file)[1].items()
    )


def is_known(description: ModelDescription) -> bool:
    """True if a family describes the model."""
    return isinstance(description, ModelShape)


def family_refusal(config: RunConfig) -> str | None:
    """Why no family describes the actor's model, in words; None if one does."""
    try:
        read_model(config.model.path, config.model.family, rope_tokens=config.model.rope_tokens)
    except UnsupportedByFamily as error:
        return error.message
    return None


def _has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES[1:])


def _stamps(folders: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """Sizes and times of the files that decide."""
    found = []
    for file in (folder / name for folder in folders for name in _FILES):
        try:
            status = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return tuple(found)


@cache
def has_model_type(model_type: str) -> bool | None:
    """True if transformers has configurations of this type; None if it is not installed."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    files = [file for name in _MAPPINGS if (file := Path(spec.origin).parent / name).is_file()]
    return any(f'("{model_type}", "' in file.read_text(encoding="utf-8") for file in files)
