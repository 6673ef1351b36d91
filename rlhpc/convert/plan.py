"""Plan of a conversion, from headers alone: the files that workers write one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

from rlhpc import __version__
from rlhpc.checkpoint.formats.megatron_folder import TRACKER, iteration_name
from rlhpc.checkpoint.formats.model_files import RECORD, model_files
from rlhpc.checkpoint.formats.safetensors_headers import FILE_BYTES, INDEX, ITEM_BYTES, NewFile, plan_files
from rlhpc.checkpoint.formats.torch_dist import CheckpointParameter, checkpoint_parameters, chunk_boxes, extra_states
from rlhpc.checkpoint.formats.torch_dist_metadata import COMMON
from rlhpc.convert.progress import size_text, time_text
from rlhpc.convert.sides import HuggingFaceSide, MegatronSide, ShardedSide, Side, known_shape
from rlhpc.convert.sources import FileState, sources_of
from rlhpc.core.errors import UserError
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import Box, TensorSpec, padded_vocab

FORMAT = 3  # of names and places in the result
CHUNK_BYTES = 32 << 20  # of the target in a worker's memory
PIECE_BYTES, _MAX_PIECES = 256 << 20, 1024  # Megatron's files: smallest size, and number
_WRITE_RATE = 1e9  # bytes per second that a dry run assumes


@dataclass(frozen=True)
class NewChunk:
    """``box`` of a parameter, or of its optimizer state ``prefix``, to be saved as one chunk."""

    parameter: CheckpointParameter
    prefix: str
    box: Box
    dtype: str

    @property
    def key(self) -> str:
        return self.prefix + self.parameter.key

    @property
    def size(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written into a safetensors file."""

    spec: TensorSpec
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.spec.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Output:
    """A file of weights: unit of a worker's work, which is not repeated after a kill. Items are in the order of their
    bytes, after ``header`` in a safetensors file."""

    file: str
    items: tuple[NewChunk, ...] | tuple[NewTensor, ...]
    header: bytes = b""

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


@dataclass(frozen=True)
class ConversionPlan:
    """``target``: megatron or hf. ``dtypes``: original types of tensors that changed, for the conversion back."""

    source: Side
    target: str
    layout: ParallelLayout
    outputs: tuple[Output, ...]
    files: tuple[NewFile, ...]
    dtypes: Mapping[str, str]
    dtype: str | None
    digest: str
    sources: tuple[FileState, ...]

    @property
    def checkpoint(self) -> str:
        """Folder of Megatron's files in the target; empty for a HuggingFace folder."""
        return iteration_name(self.source.iteration) if self.target == "megatron" else ""

    @property
    def parameters(self) -> int:
        """Number of parameters, with tied ones counted once."""
        return sum(prod(spec.shape) for spec in self.source.specs.values())

    @property
    def write_bytes(self) -> int:
        return sum(output.size for output in self.outputs)

    @property
    def small_files(self) -> list[str]:
        """Names of the files besides weights."""
        names = [file.name for file in model_files(self.source.model_folder)]
        if self.target == "megatron":
            own = (".metadata", "metadata.json", COMMON, f"__{len(self.outputs)}_0.distcp")
            return [*names, TRACKER, *(f"{self.checkpoint}/{name}" for name in own)]
        return [*names, INDEX] if len(self.files) > 1 else names

    @property
    def names(self) -> list[str]:
        """Names of all files of the target."""
        return [*(output.file for output in self.outputs), *self.small_files, RECORD]

    @property
    def record(self) -> dict[str, Any]:
        """Source and options, for the target's record."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "version": __version__,
            "source": str(self.source.folder.absolute()),
            "target": self.target,
            "layout": self.layout.text,
            "dtype": self.dtype,
            "dtypes": dict(self.dtypes),
        }

    @property
    def read_bytes(self) -> int:
        """Bytes of the model in the source's files."""
        if isinstance(self.source, HuggingFaceSide):
            return sum(tensor.size for tensor in (*self.source.tensors.values(), *self.source.scales.values()))
        if isinstance(self.source, ShardedSide):
            keys = self.source.parameters
        else:
            prefixes = self.source.prefixes if self.target == "megatron" else [""]
            keys = {prefix + parameter.key for prefix in prefixes for parameter in self.source.parameters}
        saved = [self.source.tensors[key] for key in keys if key in self.source.tensors]
        return sum(prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in saved)


def plan_layout(source: Side, axes: Mapping[str, int | None]) -> ParallelLayout:
    """Layout from the options ``--tp`` and so on; raises UserError if it does not fit the model."""
    if isinstance(source, ShardedSide) or not any(axes.values()):
        return ParallelLayout(1)  # the first becomes a HuggingFace folder
    from rlhpc.config.training import ParallelSection  # imports pydantic, a third of a conversion's start
    from rlhpc.plan.checks.parallelism import fitting_layout

    section = ParallelSection(**{axis: size for axis, size in axes.items() if size is not None})
    world = section.pp * lcm(section.tp, section.etp * section.ep)
    try:
        return fitting_layout(section, world, known_shape(source))
    except UserError as error:
        where = error.where.replace("actor.parallel.", "--").replace("_", "-")
        raise UserError(error.message, where=where, remedy=error.remedy) from None


def plan_conversion(
    source: Side,
    target: str,
    layout: ParallelLayout,
    dtype: str | None = None,
    piece_bytes: int = PIECE_BYTES,
    file_bytes: int = FILE_BYTES,
) -> ConversionPlan:
    """``target``: megatron or hf; ``dtype``: name in safetensors, by default that of each tensor.

    ``piece_bytes``: minimum size of Megatron's files; ``file_bytes``: maximum size of a safetensors file.
    """
    sources = sources_of(source)
    digest = _digest(source, sources, target, layout, dtype, piece_bytes, file_bytes)
    if target == "megatron":
        chunks, dtypes = _new_chunks(source, layout, dtype)
        outputs = tuple(_chunk_files(chunks, piece_bytes, iteration_name(source.iteration)))
        return ConversionPlan(source, target, layout, outputs, (), dtypes, dtype, digest, sources)
    specs = source.specs
    kinds = {name: source.dtype_of(name) if dtype is None or spec.float32 else dtype for name, spec in specs.items()}
    tensors = [(name, kinds[name], spec.shape) for name, spec in specs.items()]
    files = tuple(plan_files(tensors, file_bytes))
    outputs = tuple(
        Output(file.name, tuple(NewTensor(specs[name], kind) for name, kind, _, _ in file.tensors), file.header)
        for file in files
    )
    return ConversionPlan(source, target, layout, outputs, files, {}, dtype, digest, sources)


def describe(plan: ConversionPlan, free_bytes: int, workers: int) -> list[str]:
    """Lines that a dry run prints."""
    source, found = plan.source, plan_json(plan, free_bytes, workers)
    into = f"torch_dist in chunks of {plan.layout.text}" if plan.target == "megatron" else "safetensors"
    read, write, free = (size_text(found[name]) for name in ("read_bytes", "write_bytes", "free_bytes"))
    return [
        f"model     {source.architecture}, {source.num_layers} layers, {plan.parameters:,} parameters",
        f"read      {read} in {found['source_files']} file(s) of {source.folder}",
        f"write     {write} of {', '.join(found['dtypes'])}: {into}, {found['files']} file(s)",
        f"disk      {free} free, {write} needed",
        f"work      {found['files']} file(s) for {workers} worker(s), about {time_text(found['seconds'])} at 1 GB/s",
        *(f"changed   {text}" for text in found["changes"]),
    ]


def plan_json(plan: ConversionPlan, free_bytes: int, workers: int) -> dict[str, Any]:
    """Plan in bytes and seconds."""
    source = plan.source
    return {
        "architecture": source.architecture,
        "layers": source.num_layers,
        "parameters": plan.parameters,
        "source": str(source.folder),
        "source_files": len(source.files),
        "read_bytes": plan.read_bytes,
        "target": plan.target,
        "layout": plan.layout.axes if plan.target == "megatron" else None,
        "dtypes": sorted({item.dtype for output in plan.outputs for item in output.items}),
        "files": len(plan.outputs),
        "write_bytes": plan.write_bytes,
        "free_bytes": free_bytes,
        "workers": workers,
        "seconds": max(plan.write_bytes, plan.read_bytes) / _WRITE_RATE,
        "changes": [*_changes(plan)],
    }


def check_disk(folder: Path, needed: int, free: int) -> None:
    """Raises UserError if the disk has too little room."""
    if needed > free:
        raise UserError(
            f"not enough disk space: {size_text(needed)} needed, {size_text(free)} free",
            where=str(folder),
            remedy="free disk space, or choose another disk",
        )


def _changes(plan: ConversionPlan) -> Iterator[str]:
    source = plan.source
    if isinstance(source, HuggingFaceSide):
        if source.scales:
            yield f"{len(source.scales)} tensors in fp8 are dequantized with their scales"
        if source.left_out:
            yield f"{len(source.left_out)} tensors are left out, such as {next(iter(source.left_out))}"
        rounded = plan.dtype and [n for n, t in source.tensors.items() if t.dtype == "F32" and plan.dtype != "F32"]
        if rounded:
            yield f"{len(rounded)} float32 tensors are rounded to {plan.dtype}"
    elif plan.target == "hf" and (
        isinstance(source, ShardedSide) or len(source.prefixes) > 1 or source.has_foreign_optimizer
    ):
        yield "optimizer states are left out: HuggingFace's format does not contain them"
    latent = known_shape(source).latent if plan.target == "megatron" else None
    if latent is not None and not latent.interleaved_rope:
        yield "rope_interleave is false: rlhpc alone reads the result, because megatron-core rotates by pairs"


def _new_chunks(source: Side, layout: ParallelLayout, dtype: str | None) -> tuple[list[NewChunk], dict[str, str]]:
    parameters = checkpoint_parameters(known_shape(source), layout.tp)
    if isinstance(source, MegatronSide):
        _refuse_foreign_optimizer(source)
        # Keeps all rows of a checkpoint, even padding.
        saved_rows = {p.key: padded_vocab(p.shape[0], layout.tp) for p in source.parameters if p.pads}
        parameters = [p.with_rows(saved_rows[p.key]) if p.pads else p for p in parameters]
    prefixes = source.prefixes if isinstance(source, MegatronSide) else [""]
    types = _key_dtypes(source, parameters, dtype)
    chunks = []
    for prefix in prefixes:
        for parameter in parameters:
            key_type = types[parameter.key]
            if prefix:
                assert isinstance(source, MegatronSide)
                saved = source.tensors.get(prefix + source.as_written[parameter.key, parameter.layer].key)
                if saved is None:  # a bias of routers has no optimizer
                    continue
                key_type = saved.dtype
            most = CHUNK_BYTES // ITEM_BYTES[key_type]
            chunks += [NewChunk(parameter, prefix, box, key_type) for box in chunk_boxes(parameter, layout, most)]
    had = dict(source.record.get("dtypes", {})) if isinstance(source, MegatronSide) else {}
    if dtype is None and isinstance(source, HuggingFaceSide):
        names = ((shard.tensor.name, types[p.key]) for p in parameters for shard in p.shards)
        had = {name: source.dtype_of(name) for name, new in names if source.dtype_of(name) != new}
    return chunks, had if dtype is None else {}


def _refuse_foreign_optimizer(source: MegatronSide) -> None:
    if source.has_foreign_optimizer:
        raise UserError(
            "has optimizer states of another program, which are not read",
            where=str(source.folder),
            remedy="convert it to a HuggingFace folder, and that one back: the weights alone are kept",
        )


def _key_dtypes(source: Side, parameters: list[CheckpointParameter], dtype: str | None) -> dict[str, str]:
    """One type for each key: the requested one, or one that represents all its parts exactly."""
    found: dict[str, set[str]] = {}
    for parameter in parameters:
        if parameter.float32:
            types = {"F32"}
        elif dtype is not None:
            types = {dtype}
        elif isinstance(source, MegatronSide):
            types = {source.tensors[source.as_written[parameter.key, parameter.layer].key].dtype}
        else:
            types = {source.dtype_of(shard.tensor.name) for shard in parameter.shards}
        found.setdefault(parameter.key, set()).update(types)
    return {key: next(iter(types)) if len(types) == 1 else "F32" for key, types in found.items()}


def _chunk_files(chunks: list[NewChunk], least: int, folder: str) -> Iterator[Output]:
    least = max(least, sum(chunk.size for chunk in chunks) // _MAX_PIECES)
    held: list[NewChunk] = []
    number = size = 0
    for chunk in chunks:
        held.append(chunk)
        size += chunk.size
        if size >= least or chunk is chunks[-1]:
            yield Output(f"{folder}/__{number}_0.distcp", tuple(held))
            held, size, number = [], 0, number + 1


def states_of(plan: ConversionPlan) -> list[str]:
    """Keys of the empty states that modules save beside their weights. Those of the source are never copied."""
    return extra_states(checkpoint_parameters(known_shape(plan.source)))


def copied_objects(plan: ConversionPlan) -> list[str]:
    """Keys of other objects, such as states of generators, which are copied from a checkpoint of a run."""
    source = plan.source
    others = [key for key in source.objects if "_extra_state" not in key] if isinstance(source, MegatronSide) else []
    return others if isinstance(source, MegatronSide) and others and source.is_ours else []


def _digest(source: Side, sources: tuple[FileState, ...], *options: object) -> str:
    """Digest of everything that the result depends on: files by size, time and inode."""
    files = [(str(path), *status) for path, *status in sources]
    value = [FORMAT, [repr(option) for option in options], files, dict(source.fields), CHUNK_BYTES]
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
