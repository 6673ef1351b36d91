"""``rlhpc plan``: predictions of a run. Imports click only; the rest when a command runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhpc.cli.options import CONFIG, JSON, OVERRIDES, complete_runs
from rlhpc.cli.output import echo, json_text
from rlhpc.core.errors import EXIT_DOES_NOT_FIT, UserError, did_you_mean

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig
    from rlhpc.plan.scenario import Scenario

_GPU = click.option("--gpu", metavar="NAME", help="GPU, such as h200; default: planning.gpu, else slurm.gpu_type.")
_COUNTS = re.compile(r"[1-9]\d{0,6}(,[1-9]\d{0,6})*")


class _PlanGroup(click.Group):
    """Names the right command where a configuration is given without one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise self._unknown(args)
        return super().resolve_command(ctx, args)

    def _unknown(self, args: list[str]) -> UserError:
        remedy = did_you_mean(args[0], self.commands)
        if Path(args[0]).suffix in (".yaml", ".yml") or Path(args[0]).is_file():
            remedy = f"write `rlhpc plan run {args[0]}`"
        return UserError(f"{args[0]!r} is not a command", where="rlhpc plan", remedy=remedy)


@click.group(cls=_PlanGroup)
def plan() -> None:
    """Predict memory and time of a run before it starts.

    Needs the configuration and the model's config.json, no GPU and no weights. See docs/planning.md.
    """


@plan.command()
@CONFIG
@OVERRIDES
@_GPU
@JSON
def run(*, config: str, overrides: tuple[str, ...], gpu: str | None, as_json: bool) -> None:
    """Predict memory by phase, step time and total time.

    Exit code 3 if the run does not fit.
    """
    from rlhpc.cli.plan_run import prediction

    lines, fits = prediction(_load(config, overrides), gpu, as_json=as_json)
    _print(lines, fits=fits)


@plan.command()
@CONFIG
@OVERRIDES
@click.option("--gpus", metavar="N,N,...", help="Numbers of GPUs to compare, such as 8,16,32.")
@_GPU
@JSON
def search(*, config: str, overrides: tuple[str, ...], gpus: str | None, gpu: str | None, as_json: bool) -> None:
    """Find the fastest layouts that fit in memory.

    Prints five parallel layouts as YAML, with time and memory of each, and compares both placements over all splits of
    the GPUs. With --gpus: the fastest layout on each number of GPUs, a row each. Exit code 3 if none fits.
    """
    from rlhpc.cli.plan_search import compared, searched

    loaded = _load(config, overrides)
    if gpus is None:
        lines, fits = searched(loaded, gpu, as_json=as_json)
    elif _COUNTS.fullmatch(gpus):
        lines, fits = compared(loaded, sorted({int(count) for count in gpus.split(",")}), gpu, as_json=as_json)
    else:
        raise UserError(f"{gpus!r}: invalid list", where="--gpus", remedy="write it as 8,16,32")
    _print(lines, fits=fits)


@plan.command()
@CONFIG
@click.argument("run_folder", metavar="RUN", shell_complete=complete_runs)
@OVERRIDES
@_GPU
@JSON
def calibrate(*, config: str, run_folder: str, overrides: tuple[str, ...], gpu: str | None, as_json: bool) -> None:
    """Fit efficiencies, disks and the start to a finished run.

    RUN is the folder of a run of CONFIG. Prints the sections `efficiency` and `disk` of a site file, and the run's mean
    lengths and its start for the section `planning` of CONFIG.
    """
    from rlhpc.cli.plan_time import calibrate_json, calibrate_lines, calibrated

    found = calibrated(_case(_load(config, overrides, Path(run_folder)), gpu, "calibrate"), Path(run_folder))
    _print([json_text(calibrate_json(found))] if as_json else calibrate_lines(found))


@plan.command()
@CONFIG
@OVERRIDES
@JSON
def measure(*, config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Measure activations of an architecture of no known family, once.

    Needs torch, for some seconds, and no weights and no GPU. Later plans of the model use the result, which is kept in
    the user's cache.
    """
    from rlhpc.cli.plan_run import measure_json, measure_lines
    from rlhpc.plan.measure import measure_run

    found = measure_run(_load(config, overrides))
    _print([json_text(measure_json(found))] if as_json else measure_lines(found))


def _load(config: str, overrides: tuple[str, ...], run: Path | None = None) -> RunConfig:
    """The configuration; without a number of ranks with that of ``run``, its folder, else of the job."""
    from rlhpc.config.load import load_config
    from rlhpc.config.schema import ranks_are_set, with_job_ranks, with_ranks
    from rlhpc.core.folder import RunFolder

    loaded = load_config(Path(config), overrides)
    if run is not None and not ranks_are_set(loaded) and RunFolder(run).config.is_file():
        loaded = with_ranks(loaded, load_config(RunFolder(run).config).resources.ranks_per_node)
    return with_job_ranks(loaded) or loaded


def _case(config: RunConfig, gpu: str | None, command: str) -> Scenario:
    from rlhpc.cli.plan_time import needed_case

    return needed_case(config, gpu, f"rlhpc plan {command}")


def _print(lines: list[str], *, fits: bool = True) -> None:
    """Prints the lines, and ends with its own exit code for a plan that does not fit."""
    echo("\n".join(lines))
    if not fits:
        sys.exit(EXIT_DOES_NOT_FIT)
