"""`rlhpc submit --dry-run` on a machine that lacks inputs of the run, and the command of the ranks that it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import Result

from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.core.files import shipped
from rlhpc.launch.runs.submit import make_plan
from tests.helpers.cases import long_but
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs

READY = {config.stem: config for config in sorted(shipped("configs").glob("ready/*.yaml"))}
SHORT = ("qwen2.5-0.5b-1gpu", "qwen2.5-7b-2nodes-separate")
GPUS, NO_GPUS = "slurm.gpus_per_node=8", "slurm.gpus_per_node=0"


def dry_run(config: Path, *words: str) -> Result:
    return invoke("submit", str(config), "--dry-run", *words)


def warnings(done: Result) -> list[str]:
    return [line.removeprefix("rlhpc: warning: ") for line in done.stderr.splitlines() if "not checked: " in line]


@pytest.mark.parametrize("name", long_but(SHORT, READY))
def test_a_ready_config_is_shown_without_its_weights(name: str) -> None:
    done = dry_run(READY[name], GPUS)
    assert done.exit_code == 0, done.exception
    found = warnings(done)
    for what in (
        "model.path: no weights in",
        "model.path: no tokenizer in",
        "data.train.0: no file",
        "data.validation.0",
    ):
        assert [line for line in found if line.startswith(f"not checked: {what}")], found
    assert "\n# ranks are started as: srun --nodes=" in done.output


def test_with_its_inputs_nothing_is_left_unchecked(tmp_path: Path) -> None:
    done = dry_run(write_inputs(tmp_path), NO_GPUS)
    assert (done.exit_code, warnings(done)) == (0, [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/model.safetensors", "not checked: model.path: no weights in "),
        ("train.jsonl", "not checked: data.train.0: no file "),
    ],
)
def test_what_is_absent_is_named_and_only_that(tmp_path: Path, name: str, words: str) -> None:
    config = write_inputs(tmp_path)
    (tmp_path / name).unlink()
    found = warnings(dry_run(config, NO_GPUS))
    assert len(found) == 1, found
    assert found[0].startswith(words)
    with pytest.raises(UserError):
        make_plan([load_config(config, [NO_GPUS])], Path.cwd())


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["model/model.safetensors", "train.jsonl"])
@pytest.mark.parametrize("way", ["a link to nothing", "empty", "a folder"])
def test_what_is_there_but_broken_is_refused(tmp_path: Path, name: str, way: str) -> None:
    config, file = write_inputs(tmp_path), tmp_path / name
    file.unlink()
    {"a link to nothing": lambda: file.symlink_to("nowhere"), "empty": file.touch, "a folder": file.mkdir}[way]()
    with pytest.raises(UserError, match=file.name):
        make_plan([load_config(config, [NO_GPUS])], Path.cwd(), dry_run=True)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    config = load_config(write_inputs(tmp_path), [NO_GPUS, "data.train.0=nowhere.csv"])
    with pytest.raises(UserError, match=r"data\.train\.0: 'nowhere\.csv' is neither"):
        make_plan([config], Path.cwd(), dry_run=True)


def test_the_ranks_command_has_the_nodes_ranks_and_next_attempt(tmp_path: Path) -> None:
    config = write_inputs(tmp_path)
    (tmp_path / "run" / "attempts" / "0004").mkdir(parents=True)
    words = [NO_GPUS, "slurm.nodes=[1, 2]", "slurm.srun_options=[--label]"]
    found = json.loads(dry_run(config, *words, "--json").stdout)
    (line,) = found["srun"]
    arguments = shlex.split(line)
    assert arguments[0] == "srun"
    assert {"--nodes=2", "--nodelist=NODE1,NODE2", "--label"} <= {*arguments}
    assert arguments[-1] == str(tmp_path / "run" / "attempts" / "0005")


def test_each_run_of_an_array_has_its_command(tmp_path: Path) -> None:
    configs = [write_inputs(tmp_path / name) for name in ("a", "b")]
    done = invoke("submit", "--array", *configs, "--dry-run", NO_GPUS)
    lines = [line for line in done.output.splitlines() if line.startswith("# ranks are started as: srun ")]
    assert [line.rpartition(" ")[2] for line in lines] == [
        str(tmp_path / name / "run" / "attempts" / "0001") for name in ("a", "b")
    ]
