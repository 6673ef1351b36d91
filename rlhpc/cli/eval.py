"""``rlhpc eval``. Imports click only; the rest when it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

_FOLDER = click.Path(path_type=Path)


@click.command("eval")
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
@click.option("--model", type=_FOLDER, metavar="FOLDER", help="A HuggingFace folder or a torch_dist checkpoint.")
@click.option("--run", metavar="RUN", help="A run's newest checkpoint; its folder, its name or its job's id.")
@click.option("--step", type=int, metavar="N", help="With --run: the checkpoint of this step.")
@click.option("--name", metavar="NAME", help="Results are in eval/NAME; default: the model's or checkpoint's name.")
@click.option("--check", is_flag=True, help="Say whether it can work, and start nothing.")
@click.option("--submit", "submits", is_flag=True, help="Hand it to Slurm as a batch job.")
@click.option("--dry-run", is_flag=True, help="With --submit: print the job script, and submit nothing.")
@click.option("--follow", is_flag=True, help="With --submit: wait for the end, showing it live.")
def evaluate(
    config: str,
    overrides: tuple[str, ...],
    model: Path | None,
    run: str | None,
    step: int | None,
    name: str | None,
    check: bool,
    submits: bool,
    dry_run: bool,
    follow: bool,
) -> None:
    """Answer the held-out prompts of CONFIG, a YAML file, with its engine, and say how good the answers are.

    The weights are those of --model or --run, else of CONFIG's own model.
    """
    from rlhpc.config.load import load_config
    from rlhpc.core.errors import UserError
    from rlhpc.launch.runs.evaluate import evaluation_of

    if (dry_run or follow) and not submits:
        raise UserError("is for a batch job", where="--dry-run" if dry_run else "--follow", remedy="add --submit")
    loaded = evaluation_of(load_config(Path(config), overrides), model, run, step, name)
    if check:
        from rlhpc.plan.checks.run import check_config

        for topic, text in check_config(loaded, prepared=loaded.prepare is None):
            click.echo(f"{topic:<8}{text}")
    elif submits:
        from rlhpc.cli.submit import hand_over
        from rlhpc.launch.runs.submit import make_plan

        hand_over(make_plan([loaded], Path.cwd()), dry_run, follow, {})
    else:
        from rlhpc.launch.runs.run import run_here

        sys.exit(run_here(loaded))
