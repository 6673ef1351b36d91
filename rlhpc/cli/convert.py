"""``rlhpc convert``: checkpoints to HuggingFace files, and those to Megatron files. Imports click only; the rest when
it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import JSON, STEP, grouped
from rlhpc.cli.output import echo, json_text
from rlhpc.core.errors import UserError, nearest

if TYPE_CHECKING:
    from rlhpc.convert.plan import ConversionPlan
    from rlhpc.convert.progress import ProgressLine
    from rlhpc.convert.sides import Side, Step


@dataclass(frozen=True)
class _Choice:
    """Options on which model of SRC is meant."""

    step: Step | None
    model: Path | None
    family: str | None


_AXES = ("tp", "pp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers")
_FOLDER = click.Path(path_type=Path)
_FOUND = {
    "hf": ("no checkpoint", "hf-to-megatron"),
    "megatron": ("a torch_dist checkpoint", "megatron-to-hf or reshard"),
    "fsdp": ("a checkpoint of train.backend fsdp", "fsdp-to-hf"),
}  # by kind: what a folder is, and the command for it


class _ByDefault(click.Group):
    """Group whose command ``auto`` needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            near = nearest(args[0], self.commands, 1)
            if near and "/" not in args[0] and not Path(args[0]).exists():
                ctx.fail(f"{args[0]!r} is neither a command nor a folder. Did you mean {near[0]!r}?")
            args = ["auto", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "SRC DST [OPTIONS] | COMMAND [ARGS]...")


@click.group(cls=_ByDefault)
def convert() -> None:
    """Convert models between HuggingFace files and checkpoints.

    `rlhpc convert SRC DST` finds out what SRC is: a HuggingFace folder becomes Megatron files, and a checkpoint or a
    run becomes a HuggingFace folder. Its options are those of `auto`.

    Runs on CPUs and never holds a whole model in memory. The FSDP2 back end loads HuggingFace folders directly.
    """


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _axis(name: str, meaning: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", type=click.IntRange(min=1), metavar="N", help=meaning)


_LAYOUT = _options(
    _axis("tp", "Tensor-parallel size to cut chunks for; other sizes can load them."),
    _axis("pp", "Pipeline-parallel size."),
    _axis("ep", "Expert-parallel size."),
    _axis("etp", "Tensor-parallel size inside an expert."),
    _axis("vpp", "Virtual pipeline stages per pipeline rank."),
    _axis("first-stage-layers", "Number of layers on the first pipeline rank, if it differs."),
    _axis("last-stage-layers", "Number of layers on the last pipeline rank, if it differs."),
)
_WORKERS = click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of processes; default: one per core, at most 8."
)
_FAMILY = click.option("--family", metavar="PACKAGE.MODULE:NAME", help="Your own model family, as model.family.")


class _DType(click.Choice[str]):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).lower().startswith(("float8", "fp8", "f8")):
            self.fail(
                "fp8 is read but not written. Write bfloat16: vLLM quantizes it while it loads (--quantization fp8).",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class _Size(click.ParamType[int]):
    """Bytes, as transformers takes sizes of files: 5GB, 500MB, 5GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Z]+)", str(value).strip().upper())
        if found is None or found[2] not in units or float(found[1]) * units[found[2]] < 1:
            self.fail(f"{value!r} is not a size such as 5GB.", param, ctx)
        return int(float(found[1]) * units[found[2]])


_WORK = _options(
    click.option("--dtype", type=_DType(["bfloat16", "float16", "float32"]), help="Data type; default: as in SRC."),
    _WORKERS,
    click.option("--dry-run", is_flag=True, help="Print the plan, made from headers alone; write nothing."),
    click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON."),
    click.option("--force", is_flag=True, help="Replace DST if a conversion wrote it."),
    click.option("--manifest", is_flag=True, help="Write SHA256SUMS for `sha256sum -c`; reads what was written again."),
    click.option("--share", metavar="I/N", help="Share I (0 to N-1) of N jobs; run once more without it at the end."),
    click.option(
        "--family", metavar="PACKAGE.MODULE:NAME", help="Import path of your own model family, as model.family."
    ),
    click.option("--piece-mib", type=click.IntRange(min=1), default=256, hidden=True),
)
_SHARD = click.option(
    "--max-shard-size",
    type=_Size(),
    metavar="SIZE",
    help="Largest safetensors file; default: 5GB, as on HuggingFace's hub.",
)
_FROM_RUN = _options(
    click.option("--step", type=STEP, metavar="N|best", help="Checkpoint of a run, or iteration; default: the newest."),
    click.option("--model", type=_FOLDER, metavar="FOLDER", help="Folder of config and tokenizer, if not found."),
)


@convert.command()
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@click.option("--from", "origin", type=click.Choice(list(_FOUND)), help="What SRC must be; default: as found.")
@click.option(
    "--to", "target", type=click.Choice(["hf", "megatron"]), help="Default: megatron from hf, hf from others."
)
@_LAYOUT
@_SHARD
@_FROM_RUN
@_WORK
def auto(
    *,
    src: Path,
    dst: Path,
    origin: str | None,
    target: str | None,
    step: Step | None,
    model: Path | None,
    **options: Any,
) -> None:
    """Convert SRC to DST by what SRC is; the default.

    Also rewrites a HuggingFace folder (--to hf), such as one in fp8 to bfloat16, and a checkpoint for another layout
    (--to megatron).
    """
    from rlhpc.convert.sides import read_side

    side = read_side(src, step, model, options["family"], any_family=target == "hf")
    if origin and side.kind != origin:
        remedy = f"pass --from {side.kind}, or leave it out"
        raise UserError(f"is {_FOUND[side.kind][0]}", where=str(side.folder), remedy=remedy)
    target = target or ("megatron" if side.kind == "hf" else "hf")
    if (side.kind, target) == ("fsdp", "megatron"):
        raise UserError(
            "a checkpoint of train.backend fsdp becomes a HuggingFace folder only",
            where="--to",
            remedy="convert it to hf, and the result to megatron",
        )
    other = "megatron" if target == "hf" else "hf"
    for name in _AXES if target == "hf" else ("max_shard_size",):
        if options[name]:
            where = "--" + name.replace("_", "-")
            raise UserError(f"applies to --to {other}", where=where, remedy=f"add --to {other}, or remove it")
    _run(side, target, dst, options)


@convert.command("hf-to-megatron")
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_LAYOUT
@_WORK
def hf_to_megatron(src: Path, dst: Path, **options: Any) -> None:
    """Convert HuggingFace files to Megatron files.

    Writes SRC, a HuggingFace folder, as a torch_dist checkpoint DST.
    """
    from rlhpc.convert.sides import read_side

    _run(_of_kind(read_side(src, family=options["family"]), "hf"), "megatron", dst, options)


@convert.command("megatron-to-hf")
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_SHARD
@_FROM_RUN
@_WORK
def megatron_to_hf(src: Path, dst: Path, step: Step | None, model: Path | None, **options: Any) -> None:
    """Convert Megatron files to HuggingFace files.

    Writes SRC, a torch_dist checkpoint or a run folder, as a HuggingFace folder DST.
    """
    from rlhpc.convert.sides import read_side

    _run(_of_kind(read_side(src, step, model, options["family"]), "megatron"), "hf", dst, options)


@convert.command("fsdp-to-hf")
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_SHARD
@_FROM_RUN
@_WORK
def fsdp_to_hf(src: Path, dst: Path, step: Step | None, model: Path | None, **options: Any) -> None:
    """Convert a checkpoint of train.backend fsdp to HuggingFace files.

    Writes SRC, a checkpoint or a run folder, as a HuggingFace folder DST, in the run's model.dtype.
    """
    from rlhpc.convert.sides import read_side

    _run(_of_kind(read_side(src, step, model, options["family"]), "fsdp"), "hf", dst, options)


@convert.command()
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_LAYOUT
@_FROM_RUN
@_WORK
def reshard(src: Path, dst: Path, step: Step | None, model: Path | None, **options: Any) -> None:
    """Rewrite a torch_dist checkpoint for another layout.

    Writes SRC to DST in chunks for that layout, optimizer state included.
    """
    from rlhpc.convert.sides import read_side

    _run(_of_kind(read_side(src, step, model, options["family"]), "megatron"), "megatron", dst, options)


@convert.command()
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_FROM_RUN
@_FAMILY
@_WORKERS
@click.option("--logprobs", is_flag=True, help="Compare log-probs of both on the same tokens too; needs PyTorch.")
@JSON
@grouped(selected=_Choice)
def verify(*, src: Path, dst: Path, selected: _Choice, workers: int | None, logprobs: bool, as_json: bool) -> None:
    """Compare the models in SRC and DST as they are on disk.

    Exits with 1 if they differ.
    """
    from rlhpc.convert.verify import verify as compare

    report = compare(src, dst, _workers(workers), **asdict(selected))
    notes = [*report.notes]
    if logprobs and not report.faults:
        from rlhpc.convert.logprobs import compare_logprobs

        notes += compare_logprobs(report)
    if as_json:
        echo(json_text({"equal": not report.faults, "faults": report.faults, "notes": notes}))
    else:
        lines = [*(f"fault: {fault}" for fault in report.faults), *notes]
        lines.append(f"{len(report.faults)} fault(s)" if report.faults else "equal")
        echo("\n".join(lines))
    sys.exit(1 if report.faults else 0)


def _of_kind(side: Side, kind: str) -> Side:
    if side.kind != kind:
        found, other = _FOUND[side.kind]
        raise UserError(f"is {found}", where=str(side.folder), remedy=f"use `rlhpc convert {other}`")
    return side


def _run(source: Side, target: str, dst: Path, options: dict[str, Any]) -> None:
    import shutil

    from rlhpc.checkpoint.formats.safetensors_headers import DTYPES, FILE_BYTES
    from rlhpc.convert.plan import describe, plan_conversion, plan_json, plan_layout
    from rlhpc.convert.staging import check_overlap
    from rlhpc.core.files import resolved
    from rlhpc.sharding.layout import ParallelLayout

    if options["as_json"] and not options["dry_run"]:
        raise UserError("applies to --dry-run", where="--json", remedy="add --dry-run")
    axes = {axis: options.get(axis) for axis in _AXES}
    layout = plan_layout(source, axes) if target == "megatron" else ParallelLayout(1)
    dtype = DTYPES[options["dtype"]] if options["dtype"] else None
    sizes = {"piece_bytes": options["piece_mib"] << 20, "file_bytes": options.get("max_shard_size") or FILE_BYTES}
    plan = plan_conversion(source, target, layout, dtype, **sizes)
    workers = _workers(options["workers"])
    if options["dry_run"]:
        check_overlap(source, resolved(dst))
        above = next(folder for folder in (resolved(dst), *resolved(dst).parents) if folder.is_dir())
        free = shutil.disk_usage(above).free
        shown = [json_text(plan_json(plan, free, workers))] if options["as_json"] else describe(plan, free, workers)
        echo("\n".join(shown))
        return
    _execute(plan, dst, workers, options)


def _execute(plan: ConversionPlan, dst: Path, workers: int, options: dict[str, Any]) -> None:
    from rlhpc.convert.execute import convert as execute
    from rlhpc.convert.progress import ProgressLine, size_text
    from rlhpc.core.shown import show

    share = _share(options["share"])
    line = ProgressLine(sys.stderr)
    try:
        done = execute(
            plan,
            dst,
            workers,
            force=options["force"],
            share=share,
            progress=line,
        )
    except KeyboardInterrupt:
        line.note("stopped; the same command continues from what is finished")
        sys.exit(130)
    finally:
        line.end()
    if options["manifest"] and share is None:
        _add_manifest(dst, workers, line)
    if not done:
        show(f"{dst} already exists, made from the same files with the same options")
    elif share is not None:
        show(f"share {share.index} of {share.count} is done; when all are, run the command without --share")
    else:
        show(f"{dst}: {size_text(plan.write_bytes)}, {line.summary()}")


def _add_manifest(dst: Path, workers: int, line: ProgressLine) -> None:
    """Writes SHA256SUMS of a complete folder, unless it has one: a conversion that replaces a folder removes it."""
    from rlhpc.checkpoint.formats.model_files import MANIFEST
    from rlhpc.convert.metadata import write_manifest

    if not (dst / MANIFEST).is_file():
        line.note(f"reading {dst} again for {MANIFEST}")
        write_manifest(dst, workers)


def _share(text: str | None) -> Any:
    from rlhpc.convert.execute import Share

    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"{text!r} is not a share", where="--share", remedy="write 0/8 for the first of eight")
    return Share(int(index), int(count))


def _workers(asked: int | None) -> int:
    import os

    return asked or min(len(os.sched_getaffinity(0)), 8)
