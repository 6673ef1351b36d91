"""A family from outside the package, as the page on families shows one: read, checked, and planned in any layout."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.checkpoint.formats.model_folder import check_weights
from rlhpc.config.load import load_config
from rlhpc.core.errors import UserError
from rlhpc.models import FAMILIES, read_model
from rlhpc.plan.checks.run import check_config
from rlhpc.sharding.layout import ParallelLayout
from rlhpc.sharding.shards import megatron_shards, model_tensors
from tests.docs.pages import DOCS, ROOT
from tests.helpers.coverage import assert_filled_once, assert_held_once, small_layouts
from tests.helpers.plain_model import write_inputs
from tests.helpers.tiny_models import make_model

FAMILY = "my_family:MISTRAL"


@pytest.fixture(autouse=True)
def working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example lies in the working folder, as a user's file does."""
    monkeypatch.chdir(DOCS / "examples")
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "my_family", raising=False)


def test_its_table_is_that_of_the_saved_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mistral")
    with pytest.raises(UserError, match="architecture 'MistralForCausalLM' is not supported"):
        read_model(folder)
    shape = read_model(folder, FAMILY)
    assert {tensor.name: tensor.shape for tensor in model_tensors(shape)} == check_weights(folder, shape).shapes
    assert set(FAMILIES) == {"llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The config of a whole run with a Mistral of zeros."""
    config = write_inputs(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    file = tmp_path / "model" / "config.json"
    fields = {**json.loads(file.read_text()), "architectures": ["MistralForCausalLM"], "sliding_window": None}
    file.write_text(json.dumps(fields))
    return config


def test_the_configuration_names_it(run: Path) -> None:
    four = ["resources.ranks_per_node=4", "actor.parallel={tp: 2, pp: 2}"]
    summary = dict(check_config(load_config(run, [f"model.family={FAMILY}", *four])))
    assert "MistralForCausalLM, 4 layers" in summary["model"]
    with pytest.raises(UserError, match=r"'MistralForCausalLM' is not supported; .*train\.backend fsdp"):
        check_config(load_config(run, ["train.backend=megatron"]))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("my_family:read", r"model.family: 'my_family:read' is a function; name a value of type rlhpc.models.Family"),
        ("my_family:MISTRL", r"model.family: 'my_family' has no 'MISTRL'; did you mean 'MISTRAL'"),
        ("no_such:FAMILY", r"model.family: cannot import 'no_such'"),
    ],
)
def test_what_is_no_family_is_refused(run: Path, family: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(load_config(run, [f"model.family={family}"]))


def test_a_family_that_does_not_know_the_architecture_is_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with pytest.raises(UserError, match=r"'Qwen2ForCausalLM' is not supported by my_family:MISTRAL; did you"):
        read_model(tmp_path / "model", FAMILY)


def test_fields_that_it_does_not_understand_are_refused(run: Path) -> None:
    file = run.parent / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": 4096}))
    with pytest.raises(UserError, match="sliding_window = 4096 is not supported"):
        check_config(load_config(run, [f"model.family={FAMILY}"]))


def test_every_element_is_held_once_in_every_layout(run: Path) -> None:
    shape = read_model(run.parent / "model", FAMILY)
    layouts = small_layouts(shape)
    assert len(layouts) > 20
    for layout in layouts:
        assert_held_once(shape, layout)
        assert_filled_once(shape, layout)


def test_its_shape_means_the_same_in_another_process(run: Path, tmp_path: Path) -> None:
    """Nothing is registered: the shape names its family by import path."""
    shape = read_model(run.parent / "model", FAMILY)
    file = tmp_path / "shape"
    file.write_bytes(pickle.dumps(shape))
    program = (
        "import pathlib, pickle, sys; from rlhpc.sharding.layout import ParallelLayout;"
        "from rlhpc.sharding.shards import megatron_shards;"
        "shape = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes());"
        "sys.stdout.buffer.write(pickle.dumps(megatron_shards(shape, ParallelLayout(2, tp=2), 1)))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        cwd=DOCS / "examples",
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert pickle.loads(elsewhere.stdout) == megatron_shards(shape, ParallelLayout(2, tp=2), 1)
