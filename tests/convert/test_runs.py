"""Checkpoints of a run, by its folder; and runs that start from a converted folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhpc.config.load import load_config
from rlhpc.convert.sides import read_side
from rlhpc.core.errors import UserError
from rlhpc.models.rope import fix_fields
from rlhpc.plan.checks.run import check_config
from tests.convert.helpers import differing, to_huggingface, to_megatron
from tests.helpers.commands import invoke
from tests.helpers.plain_model import write_inputs
from tests.helpers.tiny_models import make_model

# What a checkpoint of a run does not have.
NOT_SAVED = ("config.json", "generation_config.json", "conversion.json")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that began with models/start, with checkpoints of steps 5 and 12."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: mine\nmodel:\n  path: models/start\n")
    make_model(tmp_path / "models" / "start", "qwen3")
    for step in (5, 12):
        model = make_model(tmp_path / f"model-{step}", "qwen3", seed=step)
        actor = to_megatron(model, folder / "checkpoints" / f"step-{step:08d}" / "actor", tp=2)
        for name in NOT_SAVED:
            (actor / name).unlink()
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize(("step", "of"), [(None, 12), (5, 5), (12, 12)])
def test_any_step_of_a_run_becomes_a_huggingface_folder(tmp_path: Path, run: Path, step: int | None, of: int) -> None:
    back = to_huggingface(run, tmp_path / "back", step=step)
    assert not differing(tmp_path / f"model-{of}", back)
    start = tmp_path / "models" / "start"
    assert (back / "config.json").read_bytes() == (start / "config.json").read_bytes()


def test_dynamic_rope_that_a_run_has_fixed_is_so_in_the_huggingface_folder(tmp_path: Path, run: Path) -> None:
    file = tmp_path / "models" / "start" / "config.json"
    fields = json.loads(file.read_text())
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    file.write_text(json.dumps({**fields, "rope_parameters": dynamic}))
    (run / "config.yaml").write_text("name: mine\nmodel:\n  path: models/start\n  rope_tokens: 1024\n")
    back = to_huggingface(run, tmp_path / "back")
    found = json.loads((back / "config.json").read_text())
    assert found == fix_fields({**fields, "rope_parameters": dynamic}, 1024)
    assert found["rope_parameters"]["rope_type"] == "default"
    done = invoke("convert", "verify", str(run), str(back))
    assert done.exit_code == 0, done.output


def test_the_best_step_is_that_of_the_newest_checkpoint(tmp_path: Path, run: Path) -> None:
    states = {5: {"best_of": "max validation/pass@1", "best_step": 5, "best_value": 0.5}, 12: {}}
    for step, state in states.items():
        file = run / "checkpoints" / f"step-{step:08d}" / "state.json"
        file.write_text(json.dumps({"state": {"step": step, **state}, "files": {}}))
    with pytest.raises(UserError, match=r"no checkpoint is the best one; set checkpoint\.keep_best"):
        read_side(run, "best")
    file.write_text(json.dumps({"state": {"step": 12, **states[5]}, "files": {}}))
    assert read_side(run, "best").home.parent.name == "step-00000005"
    done = invoke("convert", "megatron-to-hf", str(run), str(tmp_path / "best"), "--step", "best")
    assert done.exit_code == 0, done.output
    assert not differing(tmp_path / "model-5", tmp_path / "best")
    wrong = invoke("convert", "megatron-to-hf", str(run), str(tmp_path / "x"), "--step", "bets")
    assert "'bets' is not a valid integer" in wrong.output


def test_a_checkpoint_by_its_own_folder(tmp_path: Path, run: Path) -> None:
    back = to_huggingface(run / "checkpoints" / "step-00000005", tmp_path / "back")
    assert not differing(tmp_path / "model-5", back)


def test_a_step_that_is_not_there_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 7; choose one of 5, 12"):
        read_side(run, step=7)


def test_a_model_that_is_gone_is_asked_for(tmp_path: Path, run: Path) -> None:
    moved = shutil.move(tmp_path / "models" / "start", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="the model 'models/start' that the run started from does not exist; pass its"):
        read_side(run)
    assert read_side(run, model=Path(moved)).model_folder == Path(moved)


def test_a_run_may_start_from_a_converted_folder(tmp_path: Path) -> None:
    config = load_config(write_inputs(tmp_path))
    there = to_megatron(config.model.path, tmp_path / "megatron")
    converted = config.model_copy(update={"model": config.model.model_copy(update={"path": there})})
    texts = [dict(check_config(c))["model"] for c in (config, converted)]
    assert texts[1].startswith(str(there))
    (there / "release" / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp: missing"):
        check_config(converted)
