"""``rlhpc init``, ``configs``, ``schema`` and ``completion``. Imports click only; the rest when a command runs."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhpc.cli.options import JSON, complete_configs, grouped, shipped_files
from rlhpc.cli.output import echo
from rlhpc.core import env
from rlhpc.core.errors import DoesNotFitError, UserError

if TYPE_CHECKING:
    from rlhpc.cli.starter import Answers
    from rlhpc.config.schema import RunConfig

OFFERED = (
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
    "ppo",
)  # fmt: skip
_COUNT = click.IntRange(min=1)
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class _Given:
    """Answers given as options; None or empty for those to ask for."""

    name: str | None
    model: str | None
    data: tuple[str, ...]
    validation: tuple[str, ...]
    algorithm: str | None
    reward: str | None
    nodes: int | None
    gpus: int | None
    gpu: str | None
    steps: int


@click.command()
@click.argument("file", default="my.yaml")
@click.option("--name", metavar="NAME", help="Name of the run; default: that of FILE.")
@click.option("--model", metavar="FOLDER", help="HuggingFace folder of the model.")
@click.option("--data", multiple=True, metavar="FILE", help="File of training prompts, .parquet or .jsonl; repeatable.")
@click.option("--validation", multiple=True, metavar="FILE", help="File of held-out prompts; repeatable.")
@click.option("--algorithm", type=click.Choice(OFFERED), help="Algorithm; default: grpo.")
@click.option(
    "--reward", metavar="NAME", help="maths, boxed, exact, number, python, or your PACKAGE.MODULE:NAME; default: maths."
)
@click.option("--nodes", type=_COUNT, metavar="N", help="Number of nodes; default: 1.")
@click.option("--gpus", type=_COUNT, metavar="N", help="GPUs per node; default: 8.")
@click.option("--gpu", metavar="NAME", help="GPU, such as h100: the fastest layout that fits is searched.")
@click.option("--steps", type=_COUNT, default=200, show_default=True, metavar="N", help="Number of RL steps.")
@grouped(given=_Given)
def init(*, file: str, given: _Given) -> None:
    """Write a commented starting configuration to FILE.

    Asks for what the options leave open, if it runs in a terminal. An existing FILE is kept. FILE: my.yaml by default.
    """
    from rlhpc.cli.starter import ALGORITHMS, merged, starting_text, starting_tree
    from rlhpc.core.files import shipped

    path = Path(file)
    if path.exists():
        raise UserError("exists", where=file, remedy="name another file, or remove it")
    answers = _answers(given, path, asks=sys.stdin.isatty() and sys.stdout.isatty())
    title, schema = f"{ALGORITHMS[answers.algorithm]}; made by `rlhpc init`", str(shipped("configs/schema.json"))

    def text_of(tree: dict[str, Any]) -> str:
        return starting_text(tree, schema, file, title)

    tree = starting_tree(answers)
    config = _parsed(text_of(tree), path.name)
    if answers.gpu is not None:
        tree = merged(tree, _layout(config, answers))
        _parsed(text_of(tree), path.name)
    try:
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(text_of(tree))
    except FileExistsError:
        raise UserError("exists", where=file, remedy="name another file, or remove it") from None
    echo(f"wrote {file}; next: rlhpc run {file} --check")


def _answers(given: _Given, file: Path, *, asks: bool) -> Answers:
    """The answers: those of the options, of the user in a terminal, else defaults."""
    from rlhpc.cli.starter import REWARDS, Answers

    def answer(option: str, value: Any, question: str, default: Any = None, kind: Any = str) -> Any:
        if value is not None and value != ():
            return value
        if asks:
            return click.prompt(question, default=default, type=kind, show_choices=False)
        if default is None:
            raise UserError("is not given", where=f"--{option}", remedy=f"add --{option}, or answer in a terminal")
        return default

    def files(value: tuple[str, ...], option: str, question: str, default: Any = None) -> tuple[str, ...]:
        found = answer(option, value, question, default)
        return tuple(found.split()) if isinstance(found, str) else found

    rewards = ", ".join(REWARDS)
    found = Answers(
        name=given.name or file.stem,
        model=answer("model", given.model, "Model (a HuggingFace folder)"),
        data=files(given.data, "data", "Training prompts (.parquet or .jsonl)"),
        validation=files(given.validation, "validation", "Held-out prompts (empty: none)", ""),
        algorithm=answer(
            "algorithm", given.algorithm, f"Algorithm ({', '.join(OFFERED)})", "grpo", click.Choice(OFFERED)
        ),
        reward=answer("reward", given.reward, f"Reward ({rewards}, or package.module:name)", "maths"),
        nodes=answer("nodes", given.nodes, "Nodes", 1, _COUNT),
        gpus=answer("gpus", given.gpus, "GPUs per node", 8, _COUNT),
        gpu=answer("gpu", given.gpu, "GPU, such as h100 (empty: not known, no layout is searched)", "") or None,
        steps=given.steps,
    )
    _check_reward(found.reward)
    return found


def _check_reward(reward: str) -> None:
    from rlhpc.cli.starter import REWARDS
    from rlhpc.core.errors import did_you_mean

    if reward not in REWARDS and ":" not in reward:
        raise UserError(f"no built-in reward {reward!r}", where="--reward", remedy=did_you_mean(reward, REWARDS))


def _parsed(text: str, name: str) -> RunConfig:
    """The text as a configuration. Raises UserError for answers that it refuses."""
    import tempfile

    from rlhpc.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        try:
            return load_config(file)
        except UserError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from None


def _layout(config: RunConfig, answers: Answers) -> dict[str, Any]:
    """The fastest layout that fits, as keys to change. Raises UserError if there is none."""
    from rlhpc.cli.plan_time import needed_machine
    from rlhpc.plan.back_ends import fitting_layouts

    shape, gpu, site = needed_machine(config, answers.gpu, "rlhpc init")
    found = [one for one in fitting_layouts(config, shape, gpu, site.efficiency).best if not one.lacks]
    if not found:
        remedy = "take more GPUs, or leave --gpu out and see `rlhpc plan search`"
        raise DoesNotFitError(f"no layout fits into {answers.ranks} x {answers.gpu}", where="--gpu", remedy=remedy)
    return dict(found[0].fragment)


@click.command()
@click.argument("name", required=False, shell_complete=complete_configs)
@JSON
def configs(*, name: str | None, as_json: bool) -> None:
    """List the configs and job scripts that come with rlhpc, or print the one called NAME.

    In a printed config, paths to shipped files (model descriptions, the schema) are absolute. --json is for the list.
    """
    from rlhpc.cli.output import json_text
    from rlhpc.core.errors import UserError, did_you_mean

    files = shipped_files()
    if name is None:
        titles = {shown: _title(file.read_text(encoding="utf-8")) for shown, file in files.items()}
        if as_json:
            listed = [{"name": shown, "title": titles[shown], "file": str(file)} for shown, file in files.items()]
            echo(json_text(listed))
            return
        width = max(map(len, files))
        for shown, title in titles.items():
            echo(f"{shown:<{width}}  {title}")
        return
    if name not in files:
        raise UserError("no shipped config or job script of this name", where=name, remedy=did_you_mean(name, files))
    echo(_with_absolute_paths(files[name].read_text(encoding="utf-8")), nl=False)


def _title(text: str) -> str:
    """First line of the opening comment, after the lines for editor and shell."""
    lines = (line for line in text.splitlines() if not line.startswith(("# yaml-language-server:", "#!")))
    return next(lines).removeprefix("# ").rstrip(":.")


def _with_absolute_paths(text: str) -> str:
    from rlhpc.core.files import shipped

    folder = shipped("configs")
    text = re.sub(r"(?<=\$schema=)\S+", lambda name: str(folder / name[0].rpartition("/")[2]), text)
    return text.replace("path: configs/", f"path: {folder}/")


@click.command()
@click.option("--site", is_flag=True, help="Print the schema of the site file.")
def schema(*, site: bool) -> None:
    """Print the JSON schema of the configuration for editors."""
    from rlhpc.config import load, site_file

    echo(site_file.json_schema() if site else load.json_schema(), nl=False)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    For bash put `eval "$(rlhpc completion bash)"` into ~/.bashrc, for zsh the same with zsh into ~/.zshrc after
    compinit; for fish write the output to ~/.config/fish/completions/rlhpc.fish.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    echo(kind(ctx.find_root().command, {}, "rlhpc", env.RLHPC_COMPLETE).source())
