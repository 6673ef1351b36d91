"""All faults of a configuration are shown at once, and a full disk stops only what starts here."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.config.load import load_config
from rlhpc.core.errors import Faults, UserError, UserErrors
from rlhpc.launch.runs.submit import make_plan
from rlhpc.plan.checks.run import check_config
from tests.helpers.commands import invoke
from tests.helpers.machine import have_free_space
from tests.helpers.plain_model import write_inputs

# One override for each check that does not depend on others, and the beginning of its error, in order of importance.
FAULTS = {
    "slurm.nodes=[3, 2]": "slurm.nodes: (3, 2): invalid range",
    "train.minibatches=5": "train.minibatches: on 3 nodes: 32 samples a step do not divide into 5 minibatches; use 4",
    "algorithm.kl={coefficient: 0, target: 0.1}": "algorithm.kl.target: a coefficient of 0 does not adapt",
    "algorithm.gamma=0.9": "algorithm.gamma: grpo does not discount",
    "rewards=[{function: 'a:b'}, {function: 'a:c'}]": "rewards.0.name: 2 functions and no name",
    "train.dynamic_sampling.arguments={a: 1}": "train.dynamic_sampling.arguments: there is no filter that takes them",
    "data.min_prompt_tokens=64": "data.min_prompt_tokens: 64 is above data.max_prompt_tokens 32",
    "actor.optimizer.arguments.momentum=1": "actor.optimizer.arguments: momentum without a function",
    "actor.moe.router_replay=true": "actor.moe.router_replay: the model has no experts",
    "data.train.0=nowhere.jsonl": "data.train.0: no such file 'nowhere.jsonl'",
    "data.validation.0=x.csv": "data.validation.0: 'x.csv' is neither .jsonl nor .parquet",
    "rollout.max_response_tokens=225": "rollout.max_response_tokens: 225 response tokens after",
}


def faults_of(folder: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        check_config(load_config(folder / "config.yaml", overrides))
    return caught.value


def test_independent_faults_are_shown_together_the_most_important_first(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    error = faults_of(tmp_path, *FAULTS)
    assert isinstance(error, UserErrors)
    lines = str(error).split(" | ")
    for beginning in FAULTS.values():
        assert [line for line in lines if line.startswith(beginning)], beginning
    places = [next(i for i, line in enumerate(lines) if line.startswith(begin)) for begin in FAULTS.values()]
    assert places == sorted(places)
    assert all(each.where and each.remedy for each in error.errors)
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("override", FAULTS)
def test_a_fault_alone_is_an_error_of_its_own(tmp_path: Path, override: str) -> None:
    """None brings others that only follow from it."""
    write_inputs(tmp_path)
    error = faults_of(tmp_path, override)
    nodes = " | " if override.startswith("slurm.nodes") else "\n"
    assert nodes not in str(error)
    assert not isinstance(error, UserErrors)


def test_at_most_twenty_are_shown(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    files = ", ".join(f"no{number}.jsonl" for number in range(30))
    lines = str(faults_of(tmp_path, f"data.train=[{files}]")).split(" | ")
    assert (len(lines), lines[-1]) == (21, "and 10 more")


def test_several_errors_survive_a_process_border() -> None:
    faults = Faults([UserError("a", where="x", remedy="b"), UserError("c"), UserError("c")])
    with pytest.raises(UserErrors) as caught:
        faults.raise_all()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) == "x: a; b | c"
    assert [each.where for each in again.errors] == ["x", ""]


def test_a_plan_shows_its_faults_together(tmp_path: Path) -> None:
    config = str(write_inputs(tmp_path))
    words = ["actor.memory.recompute=full", "actor.memory.recompute_layers=3", "planning.prompt_tokens=99"]
    done = invoke("plan", "run", config, *words, "rollout.max_response_tokens=225")
    assert isinstance(done.exception, UserErrors)
    wheres = [error.where for error in done.exception.errors]
    assert wheres == ["actor.memory.recompute_layers", "rollout.max_response_tokens", "planning.prompt_tokens"]


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config whose run folder is on a disk with a KiB free."""
    have_free_space(monkeypatch, 1024)
    return str(write_inputs(tmp_path))


def command(*words: str) -> Result:
    return invoke(*words)


def test_a_full_disk_is_a_warning_where_nothing_starts(full_disk: str) -> None:
    checked = command("run", full_disk, "--check")
    assert checked.exit_code == 0
    assert "warning run_dir: a checkpoint takes 0.0 GiB, the disk of " in checked.output
    assert "`rlhpc run` and `rlhpc submit` refuse it" in checked.output
    dry = command("submit", full_disk, "--dry-run", "slurm.gpus_per_node=0")
    assert dry.exit_code == 0
    assert "rlhpc: warning: run_dir: a checkpoint takes" in dry.stderr
    assert "#SBATCH" in dry.stdout


def test_a_full_disk_stops_what_starts_and_hides_no_other_fault(full_disk: str, tmp_path: Path) -> None:
    for words in (["run", full_disk], ["submit", full_disk, "slurm.gpus_per_node=0"]):
        error = command(*words, "data.validation.0=x.csv").exception
        assert isinstance(error, UserErrors)
        assert [each.where for each in error.errors] == ["data.validation.0", "run_dir"]
    with pytest.raises(UserError, match=r"^slurm.gpus_per_node: neither .* \| run_dir: a checkpoint takes"):
        make_plan([load_config(Path(full_disk))], tmp_path)
    assert not (tmp_path / "run").exists()
