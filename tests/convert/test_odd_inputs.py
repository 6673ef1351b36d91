"""Odd inputs of a conversion are refused in one line, or work."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.model_files import RECORD
from rlhpc.convert.plan import plan_layout
from rlhpc.convert.sides import read_side
from rlhpc.convert.verify import verify
from rlhpc.core import env
from rlhpc.core.errors import UserError
from tests.convert.helpers import differing, tensors_of, to_huggingface, to_megatron
from tests.helpers.commands import invoke
from tests.helpers.tiny_models import make_model

_SIX_HEADS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_size": 96,
    "intermediate_size": 192,
}
DRY_RUN = ("--dry-run", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", "qwen3", vocab_size=2048)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files", 1),
        ("files", {"config.json": "x"}),
        ("sha256", []),
        ("dtypes", [[]]),
        ("dtypes", {"model.norm.weight": "F64"}),
    ],
)
def test_an_odd_record_is_refused(tmp_path: Path, model: Path, name: str, value: Any) -> None:
    there = to_megatron(model, tmp_path / "there")
    record = json.loads((there / RECORD).read_text())
    (there / RECORD).write_text(json.dumps({**record, name: value}))
    with pytest.raises(UserError, match=rf"{RECORD}: is damaged \({name}\)"):
        to_huggingface(there, tmp_path / "back")
    assert any(f"is damaged ({name})" in fault for fault in verify(model, there, workers=1).faults)


@pytest.mark.heavy
@pytest.mark.parametrize("target", [to_megatron, to_huggingface])
def test_a_model_without_shared_experts_may_say_zero(tmp_path: Path, target: Callable[..., Path]) -> None:
    """transformers saves them as tensors without elements."""
    import torch

    source = make_model(tmp_path / "model", "dsv3", n_shared_experts=0)
    empty = {name for name, tensor in tensors_of(source).items() if not tensor.numel()}
    assert len(empty) == 3
    made = target(source, tmp_path / "made")
    assert not verify(source, made, workers=1).faults
    back = made if target is to_huggingface else to_huggingface(made, tmp_path / "back")
    assert set(differing(source, back)) == empty
    from transformers import AutoModelForCausalLM

    ids = torch.arange(8)[None]
    logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (source, back)]
    assert torch.equal(*logits)


def test_a_size_that_does_not_divide_rows_of_heads_is_refused(tmp_path: Path) -> None:
    """Six ranks share one head of keys and values: 8 heads of 4 rows do not divide into 6."""
    source = make_model(tmp_path / "model", "llama", **_SIX_HEADS)
    side = read_side(source)
    with pytest.raises(UserError, match="--tp: 6 does not divide the model's 32 rows of query, key and value"):
        plan_layout(side, {"tp": 6})
    assert plan_layout(side, {"tp": 2}).tp == 2


def test_a_model_that_transformers_cannot_build_is_refused_in_one_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.TORCHDYNAMO_DISABLE, "1")  # the command sets it for its process, which is this one
    source = Path(shutil.copytree(model, tmp_path / "source"))
    fields = json.loads((source / "config.json").read_text())
    del fields["model_type"]
    (source / "config.json").write_text(json.dumps(fields))
    back = to_huggingface(to_megatron(source, tmp_path / "there"), tmp_path / "back")
    done = invoke("convert", "verify", "--logprobs", str(source), str(back))
    assert isinstance(done.exception, UserError)
    assert "the model cannot be computed (ValueError: " in str(done.exception)


def test_a_dry_run_reports_the_disk_that_a_link_points_to(tmp_path: Path, model: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        (tmp_path / "link").symlink_to(Path(elsewhere, "not", "there"))
        done = invoke("convert", "hf-to-megatron", str(model), str(tmp_path / "link"), *DRY_RUN)
        free = json.loads(done.stdout)["free_bytes"]
        here, there = (shutil.disk_usage(folder).free for folder in (tmp_path, elsewhere))
        assert abs(free - there) < abs(free - here)
