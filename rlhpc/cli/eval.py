"""``rlhpc eval``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhpc.cli.options import CONFIG, JSON, OVERRIDES, STEP, complete_runs, grouped, print_checks
from rlhpc.cli.output import run_printing
from rlhpc.core.errors import UserError

if TYPE_CHECKING:
    from rlhpc.convert.sides import Step

_FOLDER = click.Path(path_type=Path)


@dataclass(frozen=True)
class _Weights:
    """Place of the weights, if not in the configuration's own model."""

    model: Path | None
    run: str | None
    step: Step | None
    name: str | None


@dataclass(frozen=True)
class _Mode:
    """Options by which an evaluation is checked, submitted or run here."""

    check: bool
    submits: bool
    dry_run: bool
    follow: bool
    as_json: bool


@click.command("eval")
@CONFIG
@OVERRIDES
@click.option("--model", type=_FOLDER, metavar="FOLDER", help="HuggingFace folder or checkpoint.")
@click.option(
    "--run", metavar="RUN", shell_complete=complete_runs, help="Newest checkpoint of a run: its folder, name or job id."
)
@click.option("--step", type=STEP, metavar="N|best", help="With --run: the checkpoint of this step, or the best one.")
@click.option("--name", metavar="NAME", help="Write results to eval/NAME; default: name of the model or checkpoint.")
@click.option("--check", is_flag=True, help="Check the configuration; start nothing.")
@click.option("--submit", "submits", is_flag=True, help="Submit to Slurm as a batch job.")
@click.option("--dry-run", is_flag=True, help="With --submit: print the job script; submit nothing.")
@click.option("--follow", is_flag=True, help="With --submit: show the run live until it ends.")
@JSON
@grouped(weights=_Weights, mode=_Mode)
def evaluate(*, config: str, overrides: tuple[str, ...], weights: _Weights, mode: _Mode) -> None:
    """Evaluate a model on held-out prompts.

    The prompts are those of CONFIG, a YAML file. The weights are those of --model or --run, else of CONFIG's own model.
    """
    from rlhpc.config.load import load_with_site
    from rlhpc.launch.runs.derived_runs import evaluation_of

    if (mode.dry_run or mode.follow) and not mode.submits:
        option = "--dry-run" if mode.dry_run else "--follow"
        raise UserError("applies to batch jobs only", where=option, remedy="add --submit")
    given = load_with_site(Path(config), overrides)
    loaded = evaluation_of(given.config, *astuple(weights))
    if mode.check:
        from rlhpc.launch.machine import with_local_ranks
        from rlhpc.launch.runs.preflight import check_architectures, check_ground_truths, serving
        from rlhpc.plan.checks.run import check_config

        if not mode.submits:
            loaded, _ = with_local_ranks(loaded)
        lines = check_config(loaded, prepared=loaded.prepare is None, starting=False)
        lines += serving(loaded)
        checks = (*check_ground_truths([loaded]), *check_architectures([loaded]))
        warnings = [("warning", text) for text in checks]
        print_checks(loaded, [*lines, *warnings], as_json=mode.as_json)
    elif mode.submits:
        from rlhpc.cli.run import SubmitOptions, submit_plan
        from rlhpc.launch.runs.submit import make_plan

        sites = [given.site.text] if given.site else []
        options = SubmitOptions(mode.dry_run, mode.follow, as_json=mode.as_json)
        submit_plan(make_plan([loaded], Path.cwd(), dry_run=mode.dry_run), options, sites=sites)
    else:
        from rlhpc.core.folder import RunFolder
        from rlhpc.launch.runs.run import run_here

        sys.exit(run_printing(lambda: run_here(loaded), RunFolder(loaded.folder).evaluation, as_json=mode.as_json))
