"""``rlhpc convert``: checkpoints to HuggingFace files, and those to Megatron files. Imports click only; the rest when
it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.echo import echo
from rlhpc.cli.json_text import json_text
from rlhpc.cli.options import JSON, STEP, grouped
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.convert.plan import ConversionPlan
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


@click.group()
def convert() -> None:
    """Convert models between HuggingFace files and checkpoints.

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
_WORK = _options(
    click.option(
        "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Data type; default: as in SRC."
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of processes; default: one per core, at most 8.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan, made from headers alone; write nothing."),
    click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON."),
    click.option("--force", is_flag=True, help="Replace DST if a conversion wrote it."),
    click.option("--share", metavar="I/N", help="Share I (0 to N-1) of N jobs; run once more without it at the end."),
    click.option(
        "--family", metavar="PACKAGE.MODULE:NAME", help="Import path of your own model family, as model.family."
    ),
    click.option("--piece-mib", type=click.IntRange(min=1), default=256, hidden=True),
)
_FROM_RUN = _options(
    click.option("--step", type=STEP, metavar="N|best", help="Checkpoint of a run; default: the newest."),
    click.option("--model", type=_FOLDER, metavar="FOLDER", help="Folder of config and tokenizer, if not found."),
)


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
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of processes; default: one per core, at most 8."
)
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

    from rlhpc.checkpoint.formats.safetensors_headers import DTYPES
    from rlhpc.convert.destination import check_overlap
    from rlhpc.convert.plan import describe, plan_conversion, plan_json, plan_layout
    from rlhpc.core.overlap import resolved

    if options["as_json"] and not options["dry_run"]:
        raise UserError("applies to --dry-run", where="--json", remedy="add --dry-run")
    layout = plan_layout(source, {axis: options.get(axis) for axis in _AXES})
    dtype = DTYPES[options["dtype"]] if options["dtype"] else None
    plan = plan_conversion(source, target, layout, dtype, piece_bytes=options["piece_mib"] << 20)
    workers = _workers(options["workers"])
    above = next(folder for folder in (dst.absolute(), *dst.absolute().parents) if folder.is_dir())
    if options["dry_run"]:
        check_overlap(source, resolved(dst))
        free = shutil.disk_usage(above).free
        shown = [json_text(plan_json(plan, free, workers))] if options["as_json"] else describe(plan, free, workers)
        echo("\n".join(shown))
        return
    _execute(plan, dst, workers, options)


def _execute(plan: ConversionPlan, dst: Path, workers: int, options: dict[str, Any]) -> None:
    from rlhpc.convert.execute import convert as execute
    from rlhpc.convert.progress import ProgressLine
    from rlhpc.core.shown import show

    share = _share(options["share"])
    line = ProgressLine(sys.stderr)
    try:
        done = execute(plan, dst, workers, force=options["force"], share=share, progress=line)
    except KeyboardInterrupt:
        line.note("stopped; the same command continues from what is finished")
        sys.exit(130)
    finally:
        line.end()
    if not done:
        show(f"{dst} already exists, made from the same files with the same options")
    elif share is not None:
        show(f"share {share.index} of {share.count} is done; when all are, run the command without --share")
    else:
        show(f"{dst}: {plan.write_bytes / 1e9:,.2f} GB, {line.summary()}")


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
