"""``rlhpc convert``: checkpoints to HuggingFace files, and those to Megatron files. Imports click only; the rest when
it runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import JSON, STEP
from rlhpc.cli.output import echo, json_text
from rlhpc.core.errors import UserError, nearest

if TYPE_CHECKING:
    from rlhpc.convert.plan import ConversionPlan
    from rlhpc.convert.sides import Side, Step


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
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    default=lambda: min(len(os.sched_getaffinity(0)), 8),
    help="Number of processes; default: one per core, at most 8.",
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
    _FAMILY,
)
_SHARD = click.option(
    "--max-shard-size", type=_Size(), metavar="SIZE", help="Largest safetensors file; default: 5GB, as on the hub."
)
_FROM_RUN = _options(
    click.option("--step", type=STEP, metavar="N|best", help="Checkpoint of a run, or iteration; default: the newest."),
    click.option("--model", type=_FOLDER, metavar="FOLDER", help="Folder of config and tokenizer, if not found."),
)


_FROM = click.option("--from", "origin", type=click.Choice(list(_FOUND)), help="What SRC must be; default: as found.")
_TO = click.option("--to", "target", type=click.Choice(["hf", "megatron"]), help="Default: megatron from hf, else hf.")

# By name: kinds of SRC and DST, None as found; own options, and help.
_NAMES: dict[str, tuple[str | None, str | None, tuple[Callable[[Any], Any], ...], str]] = {
    "auto": (None, None, (_FROM, _TO, _LAYOUT, _SHARD, _FROM_RUN), "Convert SRC to DST by what SRC is; the default."),
    "hf-to-megatron": ("hf", "megatron", (_LAYOUT,), "Convert a HuggingFace folder to a torch_dist checkpoint."),
    "megatron-to-hf": (
        "megatron",
        "hf",
        (_SHARD, _FROM_RUN),
        "Convert a torch_dist checkpoint to a HuggingFace folder.",
    ),
    "fsdp-to-hf": (
        "fsdp",
        "hf",
        (_SHARD, _FROM_RUN),
        "Convert a checkpoint of train.backend fsdp, as model.dtype says.",
    ),
    "reshard": ("megatron", "megatron", (_LAYOUT, _FROM_RUN), "Rewrite a torch_dist checkpoint for another layout."),
}


def _command(name: str) -> click.Command:
    origin, target, own, text = _NAMES[name]

    def run(src: Path, dst: Path, step: Step | None = None, model: Path | None = None, **options: Any) -> None:
        from rlhpc.convert.sides import read_side

        wanted, to = options.get("origin", origin), options.get("target", target)
        side = read_side(src, step, model, options["family"], any_family=name == "auto" and to == "hf")
        if wanted not in (None, side.kind):
            found, other = _FOUND[side.kind]
            remedy = f"pass --from {side.kind}, or leave it out" if origin is None else f"use `rlhpc convert {other}`"
            raise UserError(f"is {found}", where=str(side.folder), remedy=remedy)
        _run(side, to or ("megatron" if side.kind == "hf" else "hf"), dst, options)

    folders = (click.argument("src", type=_FOLDER), click.argument("dst", type=_FOLDER))
    return click.command(name, help=text)(_options(*folders, *own, _WORK)(run))


for _name in _NAMES:
    convert.add_command(_command(_name))


@convert.command()
@click.argument("src", type=_FOLDER)
@click.argument("dst", type=_FOLDER)
@_FROM_RUN
@_FAMILY
@_WORKERS
@click.option("--logprobs", is_flag=True, help="Compare log-probs of both on the same tokens too; needs PyTorch.")
@JSON
def verify(*, src: Path, dst: Path, workers: int, logprobs: bool, as_json: bool, **selected: Any) -> None:
    """Compare the models in SRC and DST as they are on disk.

    Exits with 1 if they differ.
    """
    from rlhpc.convert.verify import verify as compare

    report = compare(src, dst, workers, **selected)
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


def _run(source: Side, target: str, dst: Path, options: dict[str, Any]) -> None:
    import shutil

    from rlhpc.checkpoint.formats.safetensors_headers import DTYPES, FILE_BYTES, stray_files
    from rlhpc.convert.plan import describe, plan_conversion, plan_json, plan_layout
    from rlhpc.convert.target import check_overlap
    from rlhpc.core.files import resolved

    _check_options(source.kind, target, options)
    layout = plan_layout(source, {axis: options.get(axis) for axis in _AXES})
    dtype = DTYPES[options["dtype"]] if options["dtype"] else None
    plan = plan_conversion(source, target, layout, dtype, file_bytes=options.get("max_shard_size") or FILE_BYTES)
    for file in stray_files(source.folder) if source.kind == "hf" else ():
        echo(f"rlhpc: warning: {file}: not in the index, and not converted", err=True)
    workers = options["workers"]
    if not options["dry_run"]:
        _execute(plan, dst, workers, force=options["force"], manifest=options["manifest"])
        return
    check_overlap(source, resolved(dst))
    above = next(folder for folder in (resolved(dst), *resolved(dst).parents) if folder.is_dir())
    free = shutil.disk_usage(above).free
    shown = [json_text(plan_json(plan, free, workers))] if options["as_json"] else describe(plan, free, workers)
    echo("\n".join(shown))


def _check_options(kind: str, target: str, options: dict[str, Any]) -> None:
    if (kind, target) == ("fsdp", "megatron"):
        raise UserError(
            "a checkpoint of train.backend fsdp becomes a HuggingFace folder only",
            where="--to",
            remedy="convert it to hf, and the result to megatron",
        )
    other = "megatron" if target == "hf" else "hf"
    for name in _AXES if target == "hf" else ("max_shard_size",):
        if options.get(name):
            where = "--" + name.replace("_", "-")
            raise UserError(f"applies to --to {other}", where=where, remedy=f"add --to {other}, or remove it")
    if options["as_json"] and not options["dry_run"]:
        raise UserError("applies to --dry-run", where="--json", remedy="add --dry-run")


def _execute(plan: ConversionPlan, dst: Path, workers: int, *, force: bool, manifest: bool) -> None:
    from rlhpc.checkpoint.formats.model_files import MANIFEST
    from rlhpc.convert.execute import convert as execute
    from rlhpc.convert.metadata import write_manifest
    from rlhpc.convert.progress import ProgressLine, size_text
    from rlhpc.core.shown import show

    line = ProgressLine(sys.stderr)
    try:
        done = execute(plan, dst, workers, force=force, progress=line)
    except KeyboardInterrupt:
        line.note("stopped; the same command continues from what is finished")
        sys.exit(130)
    finally:
        line.end()
    if manifest and not (dst / MANIFEST).is_file():  # a conversion that replaces a folder removes it
        line.note(f"reading {dst} again for {MANIFEST}")
        write_manifest(dst, workers)
    if done:
        show(f"{dst}: {size_text(plan.write_bytes)}, {line.summary()}")
    else:
        show(f"{dst} already exists, made from the same files with the same options")
