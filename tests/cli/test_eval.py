"""``rlhpc eval``: what becomes of a configuration, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.launch.runs.derived_runs import evaluation_of
from rlhpc.plan.checks.run import largest_usable
from tests.cli.test_light import HEAVY, modules_after
from tests.cli.test_main import error_line, rlhpc
from tests.helpers.plain_model import write_inputs, write_model


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """With held-out prompts; those for training are not there."""
    file = write_inputs(tmp_path)
    (tmp_path / "train.jsonl").rename(tmp_path / "held_out.jsonl")
    file.write_text(file.read_text().replace("data:\n", f"data:\n  validation: [{tmp_path / 'held_out.jsonl'}]\n"))
    return file


def test_an_evaluation_is_a_run_without_steps_in_a_folder_of_its_own(config: Path):
    plain = evaluation_of(load_config(config, ["sft={data: [x.jsonl], steps: 3}"]))
    assert plain.evaluates_only
    assert (plain.name, plain.run_dir, plain.data.train) == ("eval-tiny", Path("eval/tiny"), [])
    assert evaluation_of(load_config(config), name="other").run_dir == Path("eval/other")


def test_a_batch_job_finds_the_nodes_that_an_evaluation_needs(config: Path):
    """Slurm's supervisor asks so, with the batches of a training run in mind."""
    assert largest_usable(evaluation_of(load_config(config, ["slurm.nodes=[1, 2]"])), 2) == 2


def test_another_model_takes_its_tokenizer_along(config: Path, tmp_path: Path):
    other = write_model(tmp_path / "other model")
    changed = evaluation_of(load_config(config), model=other)
    assert (changed.model.path, changed.model.weights) == (other, None)
    assert (changed.name, changed.run_dir) == ("eval-other_model", Path("eval/other_model"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--step", "3"], "rlhpc: --step: applies to checkpoints of a run; add --run"),
        (["--run", "a", "--model", "b"], "rlhpc: --model: excludes --run; leave out one of them"),
        (["--model", "nowhere"], "rlhpc: nowhere: no such folder; pass the folder of a model"),
        (["--follow"], "rlhpc: --follow: applies to batch jobs only; add --submit"),
        (["data.validation=[]"], "rlhpc: data.validation: no held-out prompts; name at least one file"),
        (
            ["validation.samples_per_prompt=4", "--check"],
            "rlhpc: validation.samples_per_prompt: 4 responses to a prompt would all be the greedy one; set "
            "validation.temperature above 0, such as 1.0",
        ),
    ],
)
def test_what_cannot_work_is_one_line(config: Path, options: list[str], line: str):
    assert error_line("eval", str(config), *options) == line


def test_a_run_without_checkpoints_is_reported(config: Path, tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(config.read_text())
    with pytest.raises(UserError, match="checkpoints: contains no checkpoint"):
        evaluation_of(load_config(config), run=str(tmp_path / "run"))


@pytest.mark.heavy
def test_a_check_says_what_would_be_done_and_imports_nothing_heavy(config: Path):
    done = rlhpc("eval", str(config), "--check")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["batch"] == "1 response(s) to each validation prompt"
    assert not modules_after("eval", str(config), "--check") & {*HEAVY, "submitit", "rich"}


def test_a_batch_job_runs_the_same(config: Path):
    done = rlhpc("eval", str(config), "--submit", "--dry-run", "slurm.gpus_per_node=0")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --job-name=eval-tiny" in done.stdout
    assert "eval/tiny/submission" in done.stdout


@pytest.mark.heavy
def test_a_run_that_has_nothing_to_do_is_still_refused(config: Path):
    assert error_line("run", str(config), "train.steps=0", "data.validation=[]").startswith(
        "rlhpc: train.steps: 0 steps"
    )
