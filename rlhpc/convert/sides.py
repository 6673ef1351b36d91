"""Contents of model folders of each kind, from their headers and indexes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlhpc.checkpoint.formats.megatron_folder import TRACKER, checkpoint_folder, iteration_of
from rlhpc.checkpoint.formats.model_files import FP8_BLOCK, RECORD, read_fields, read_object, unquantised
from rlhpc.checkpoint.formats.safetensors_headers import ITEM_BYTES, StoredTensor, read_folder
from rlhpc.checkpoint.formats.torch_archive import read_file
from rlhpc.checkpoint.formats.torch_dist import CheckpointParameter, checkpoint_parameters, places_of, tiles
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON, SavedTensor, read_index, saved_parameters
from rlhpc.checkpoint.formats.weight_table import (
    TableWeight,
    backend_of_checkpoint,
    check_table,
    is_sharded,
    read_table,
)
from rlhpc.core.attempts import saved_best
from rlhpc.core.errors import UserError, did_you_mean
from rlhpc.core.folder import RunFolder
from rlhpc.models import (
    ModelDescription,
    ModelShape,
    TensorHeader,
    UnsupportedByFamily,
    describe_fields,
    has_dynamic_rope,
    shape_of,
)
from rlhpc.models.rope import fix_fields
from rlhpc.sharding.shards import Box, Shard, TensorSpec, model_tensors

SCALE = "_scale_inv"
_STEP = re.compile(r"step-(\d+)")
Step = int | Literal["best"]  # of a run's checkpoint
_SCALES = ("F32", "BF16", "F16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Not weights of the model: tables that old versions saved.
_LEFT_OUT = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.masked_bias$")


class _Described:
    """Properties of a side that follow from its model's description."""

    shape: ModelDescription

    @property
    def architecture(self) -> str:
        return self.shape.architecture

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in model_tensors(self.shape)}


class _Chunked:
    """Files of a checkpoint in chunks."""

    folder: Path
    tensors: Mapping[str, SavedTensor]

    @property
    def files(self) -> list[Path]:
        return sorted({self.folder / chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})


@dataclass(frozen=True)
class HuggingFaceSide(_Described):
    """Safetensors of a model. ``left_out``: tensors in the files that rlhpc's model does not contain."""

    folder: Path
    shape: ModelDescription
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]
    left_out: Mapping[str, StoredTensor]
    kind, iteration = "hf", None

    @property
    def home(self) -> Path:
        """Folder that the user names."""
        return self.folder

    @property
    def model_folder(self) -> Path:
        """Folder of config and tokenizer."""
        return self.folder

    def dtype_of(self, name: str) -> str:
        """Type of the tensor's numbers; bfloat16 for fp8 with scales."""
        dtype = self.tensors[name].dtype
        return "BF16" if dtype == "F8_E4M3" else dtype

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})


@dataclass(frozen=True)
class MegatronSide(_Described, _Chunked):
    """A torch_dist checkpoint. ``folder``: that of its files; ``home``: the one that contains it with its tracker file,
    if there is one. ``record``: that of the conversion that wrote it; empty for a training checkpoint."""

    home: Path
    folder: Path
    shape: ModelShape
    fields: Mapping[str, Any]
    model_folder: Path
    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, tuple[str, int, int]]
    record: Mapping[str, Any]
    kind = "megatron"

    @cached_property
    def parameters(self) -> list[CheckpointParameter]:
        """Parameters of the model, by the checkpoint's names and with its number of vocabulary rows."""
        return saved_parameters(self.tensors, self.shape, self.folder, self.model_folder)

    @cached_property
    def as_written(self) -> dict[tuple[str, int | None], CheckpointParameter]:
        """Parameters of this checkpoint by key and layer of those that a conversion writes, which may have other
        names."""
        written = checkpoint_parameters(self.shape)
        return {(new.key, new.layer): saved for new, saved in zip(written, self.parameters, strict=True)}

    @property
    def iteration(self) -> int | None:
        """Iteration of a training checkpoint; None for a model without one."""
        return iteration_of(self.folder)

    @cached_property
    def is_ours(self) -> bool:
        """True if a run or a conversion of rlhpc wrote it. Raises UserError for a poisoned common.pt."""
        if self.record:
            return True
        common = read_file(self.folder / COMMON) if (self.folder / COMMON).is_file() else {}
        content = common.get("content_metadata") if isinstance(common, dict) else None
        return isinstance(content, dict) and "rng_axes" in content

    @property
    def has_foreign_optimizer(self) -> bool:
        """True if it has optimizer states in another program's form."""
        return any("optimizer" in key for key in self.tensors) and not self.is_ours

    @cached_property
    def places(self) -> dict[str, list[tuple[CheckpointParameter, Shard]]]:
        """Parameters that contain each HuggingFace tensor, with its shards."""
        return places_of(self.parameters)

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of keys: '' for the weights, and those of optimizer states such as 'optimizer.state.exp_avg.'"""
        first = self.parameters[0].key
        return [key.removesuffix(first) for key in self.tensors if key == first or key.endswith("." + first)]

    def dtype_of(self, name: str) -> str:
        dtypes: Mapping[str, str] = self.record.get("dtypes", {})
        return dtypes.get(name) or self.tensors[self.places[name][0][0].key].dtype


@dataclass(frozen=True)
class ShardedSide(_Chunked):
    """A checkpoint of the FSDP2 back end. ``weights``: HuggingFace's tensors by name, as blocks of ``tensors``."""

    folder: Path
    fields: Mapping[str, Any]
    model_folder: Path
    tensors: Mapping[str, SavedTensor]
    weights: Mapping[str, TableWeight]
    kind, iteration = "fsdp", None

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: weight.tensor for name, weight in self.weights.items()}

    @property
    def home(self) -> Path:
        return self.folder

    @property
    def architecture(self) -> str:
        return str(next(iter(self.fields.get("architectures") or ()), "model"))

    @property
    def num_layers(self) -> int:
        return 1 + max((spec.layer for spec in self.specs.values() if spec.layer is not None), default=-1)

    @property
    def parameters(self) -> set[str]:
        """Keys of the weights in the checkpoint."""
        return {piece.parameter for weight in self.weights.values() for piece in weight.pieces}

    def dtype_of(self, name: str) -> str:
        """Type of the model's tensor, to which the float32 master weights are cast."""
        return self.weights[name].dtype

    def coverage_faults(self) -> Iterator[str]:
        """Parameters of which an element is in no tensor, or in several."""
        blocks: dict[str, list[Box]] = {}
        for weight in self.weights.values():
            for piece in weight.pieces:
                blocks.setdefault(piece.parameter, []).append(piece.source)
        for name, boxes in blocks.items():
            if not tiles(self.tensors[name].shape, boxes):
                yield f"{name}: not every element is in exactly one tensor"


Side = HuggingFaceSide | MegatronSide | ShardedSide


def known_shape(side: Side) -> ModelShape:
    """Shape of a model that is converted to or from Megatron's files."""
    assert not isinstance(side, ShardedSide)
    assert isinstance(side.shape, ModelShape)
    return side.shape


def read_side(
    path: Path,
    step: Step | None = None,
    model: Path | None = None,
    family: str | None = None,
    *,
    any_family: bool = False,
) -> Side:
    """Contents of a HuggingFace folder, a converted folder, a checkpoint of a run, or a run folder.

    ``step``: checkpoint of a run, by default the newest; ``model``: folder of config and tokenizer if it is not found.
    ``any_family``: a HuggingFace folder may be of an architecture without family. Raises UserError.
    """
    if not path.is_dir():
        raise UserError("no such folder", where=str(path), remedy="pass the folder of a model")
    found = _checkpoint_of(path, step)
    if found is None:
        return _read_huggingface(path, family, any_family=any_family)
    home, checkpoint = found
    config = model or _model_folder(home, checkpoint)
    fields = _as_trained(read_fields(config), checkpoint)
    if is_sharded(checkpoint):
        return _read_sharded(checkpoint, fields, config)
    index, record = read_index(checkpoint), read_record(home)
    shape = shape_of(unquantised(fields, config), str(config / "config.json"), family)
    side = MegatronSide(home, checkpoint, shape, fields, config, index.tensors, index.objects, record)
    assert side.parameters  # reading them checks them
    return side


def read_record(folder: Path) -> dict[str, Any]:
    """Record of the conversion that wrote a folder; empty for other folders. Raises UserError for a damaged one."""
    path = folder / RECORD
    record = read_object(path) if path.is_file() else {}
    damaged = next((name for name, is_right in _RECORDED.items() if not _are(record.get(name, {}), is_right)), None)
    if damaged:
        raise UserError(f"is damaged ({damaged})", where=str(path), remedy="convert the model again")
    return record


def _are(values: object, is_right: Callable[[Any], bool]) -> bool:
    """True if it is an object with such values."""
    return isinstance(values, dict) and all(map(is_right, values.values()))


_RECORDED: dict[str, Callable[[Any], bool]] = {
    "files": lambda value: type(value) is int,
    "sha256": lambda value: isinstance(value, str),
    "dtypes": lambda value: value in (*ITEM_BYTES,),
}


def _read_huggingface(folder: Path, family: str | None, *, any_family: bool) -> HuggingFaceSide:
    safe = any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file()
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles and not safe:
        raise UserError(
            f"contains {pickles[0]}, a pickle, which can run any program when it is read: it is not opened",
            where=str(folder),
            remedy="download the model's safetensors; or, in a sandbox, load it with "
            "AutoModelForCausalLM.from_pretrained and save it with save_pretrained",
        )
    fields = read_fields(folder)
    stored = read_folder(folder)
    shape = _describe(folder, unquantised(fields, folder), family, stored if any_family else None)
    specs = {tensor.name: tensor for tensor in model_tensors(shape)}
    scales = {name: t for name, t in stored.items() if name.endswith(SCALE) and name.removesuffix(SCALE) in specs}
    tensors = {name: stored[name] for name in specs if name in stored}
    others = {name: t for name, t in stored.items() if name not in specs and name not in scales}
    side = HuggingFaceSide(folder, shape, fields, tensors, scales, others)
    _check_huggingface(side)
    return side


def _describe(
    folder: Path, fields: dict[str, Any], family: str | None, stored: Mapping[str, StoredTensor] | None
) -> ModelDescription:
    """The model by its family; without one by its tensors, if they are given."""
    where = str(folder / "config.json")
    try:
        return shape_of(fields, where, family)
    except UnsupportedByFamily:
        if family is not None or stored is None:
            raise
    return describe_fields(fields, where, tuple(TensorHeader(t.name, t.shape, t.dtype) for t in stored.values()))


def _check_huggingface(side: HuggingFaceSide) -> None:
    missing = [name for name in side.specs if name not in side.tensors]
    if missing:
        raise UserError(
            f"the weights have no tensor {missing[0]!r}" + (f", nor {len(missing) - 1} others" if missing[1:] else ""),
            where=str(side.folder),
            remedy="use the weights that belong to its config.json",
        )
    for name, spec in side.specs.items():
        stored = side.tensors[name]
        if stored.shape != spec.shape:
            raise UserError(
                f"{name!r} has shape {list(stored.shape)}, config.json requires {list(spec.shape)}",
                where=str(stored.file),
                remedy="use the config.json that belongs to these weights",
            )
        if stored.dtype == "F8_E4M3":
            _check_scale(side, stored)
    for name, stored in side.left_out.items():
        if 0 not in stored.shape and not _may_be_left_out(side.shape, name):
            raise UserError(
                f"the weights have {name!r}, which the model of config.json has not",
                where=str(side.folder),
                remedy=did_you_mean(name, side.specs) + " (config.json and weights must belong together)",
            )


def _check_scale(side: HuggingFaceSide, stored: StoredTensor) -> None:
    """Refuses fp8 weights without a scale for each block, such as those with one for each tensor or row."""
    scale = side.scales.get(stored.name + SCALE)
    wanted = tuple(-(-n // FP8_BLOCK) for n in stored.shape)
    if scale is None and stored.name + "_scale" not in side.left_out:
        raise UserError(
            f"the scale {stored.name + SCALE!r} is missing",
            where=str(stored.file),
            remedy="fp8 weights need their scales: download all files of the model",
        )
    if scale is None or scale.shape != wanted or scale.dtype not in _SCALES:
        found = side.left_out[stored.name + "_scale"] if scale is None else scale
        raise UserError(
            f"the scale {found.name!r} is {found.dtype} {list(found.shape)}",
            where=str(stored.file),
            remedy=f"dequantize the weights first; supported: {', '.join(_SCALES)} {list(wanted)} in "
            f"'weight{SCALE}', one for {FP8_BLOCK} x {FP8_BLOCK} elements",
        )


def _may_be_left_out(shape: ModelDescription, name: str) -> bool:
    """True if rlhpc's model has no such tensor: old tables, a tied head, DeepSeek-V3's layers for further tokens."""
    if _LEFT_OUT.search(name) or (shape.tied_embeddings and name == "lm_head.weight"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return shape.latent is not None and layer is not None and int(layer[1]) >= shape.num_layers


def _checkpoint_of(path: Path, step: Step | None) -> tuple[Path, Path] | None:
    """Folder of a checkpoint, and that of its files, which may be the same; None for a HuggingFace folder."""
    checkpoints = RunFolder(path).checkpoints
    if checkpoints.is_dir():
        actor = _step_folder(checkpoints, step) / "actor"
        return actor, checkpoint_folder(actor)
    if isinstance(step, int) and (path / TRACKER).is_file():
        return path, checkpoint_folder(path, step)
    if step is not None:
        raise UserError(
            f"{str(path)!r} is not a run folder", where="--step", remedy="pass the run folder, or leave out --step"
        )
    for folder in (path, path / "actor"):
        if backend_of_checkpoint(folder) is not None:
            found = checkpoint_folder(folder)
            return (found.parent if (found.parent / TRACKER).is_file() else folder), found
    return None


def _step_folder(checkpoints: Path, step: Step | None) -> Path:
    steps = {int(found[1]): folder for folder in checkpoints.iterdir() if (found := _STEP.fullmatch(folder.name))}
    if not steps:
        raise UserError("contains no checkpoint", where=str(checkpoints))
    if step is None:
        return steps[max(steps)]
    if step == "best":
        step = _best_step(checkpoints)
    if step not in steps:
        raise UserError(
            f"no checkpoint of step {step}",
            where=str(checkpoints),
            remedy="choose one of " + ", ".join(map(str, sorted(steps))),
        )
    return steps[step]


def _best_step(checkpoints: Path) -> int:
    best = saved_best(RunFolder(checkpoints.parent))
    if best is None:
        raise UserError(
            "no checkpoint is the best one",
            where=str(checkpoints),
            remedy="set checkpoint.keep_best before the run, or choose a step",
        )
    return best.step


def _read_sharded(folder: Path, fields: Mapping[str, Any], model_folder: Path) -> ShardedSide:
    """The checkpoint in ``folder``, whose config and tokenizer are in ``model_folder``. Raises UserError."""
    index, table = read_index(folder), read_table(folder)
    check_table(table, index.tensors, folder)
    weights = {weight.tensor.name: weight for weight in table}
    return ShardedSide(folder, fields, model_folder, index.tensors, weights)


def _model_folder(home: Path, checkpoint: Path) -> Path:
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


def _as_trained(fields: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
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
