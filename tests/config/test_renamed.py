"""Each old key and value gets one line with its new name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config import yaml12
from rlhpc.config.load import load_config
from rlhpc.config.renamed import RENAMED, RENAMED_FIGURES, RENAMED_VALUES
from rlhpc.config.site import EfficiencySection, GpuEntry
from rlhpc.core.errors import UserError

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
# What a section needs before it can be written at all.
AROUND = {
    "train.dynamic_sampling.shortage": "train.dynamic_sampling={}",
    "rewards.0.too_long": "rewards=[{model: m}]",
}


def error_line(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(DEMO, overrides)
    return str(caught.value)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_names_the_new_one(old: str) -> None:
    new = RENAMED[old]
    assert error_line(f"{old}=0.5") == f"command line: {old}: has another name now; write {new}"
    around = ["rewards=[{model: m}]"] if old.startswith("reward.model.") else []
    assert f"{new}: unknown key" not in error_line(*around, f"{new}=[[]]"), "the new key exists"


def test_a_file_with_old_sections_names_what_they_are_now() -> None:
    both = "memory={recompute: full, offload: {gradients: true, reference: true}}"
    assert error_line("parallel={tp: 2, pp: 2}") == "command line: parallel: has another name now; write actor.parallel"
    assert error_line("train.optimizer={beta1: 1, clip_gradient: 1}").split(" | ") == [
        "command line: train.optimizer.beta1: has another name now; write actor.optimizer.beta1",
        "command line: train.optimizer.clip_gradient: has another name now; write actor.optimizer.max_grad_norm",
    ]
    assert error_line(both).split(" | ") == [
        "command line: memory.recompute: has another name now; write actor.memory.recompute",
        "command line: memory.offload.gradients: has another name now; write actor.memory.offload.gradients",
        "command line: memory.offload.reference: has another name now; write reference.memory.offload",
    ]


@pytest.mark.parametrize(("key", "old"), [(key, old) for key, values in RENAMED_VALUES.items() for old in values])
def test_an_old_value_names_the_new_one(key: str, old: str) -> None:
    new, around = RENAMED_VALUES[key][old], [AROUND[key]] if key in AROUND else []
    assert error_line(*around, f"{key}={old}") == f"command line: {key}: {old!r} has another name now; write {new}"
    assert load_config(DEMO, [*around, f"{key}={new}"])


@pytest.mark.parametrize("old", RENAMED_FIGURES)
def test_an_old_figure_in_the_site_s_file_names_the_new_one(old: str, tmp_path: Path) -> None:
    new = RENAMED_FIGURES[old]
    in_efficiency = new in EfficiencySection.model_fields
    assert in_efficiency or new in GpuEntry.model_fields
    figures = {"efficiency": {old: 0.5}} if in_efficiency else {"gpus": {"mine": {"like": "h100", old: 0.5}}}
    file = tmp_path / "site.yaml"
    file.write_text(yaml12.dump(figures))
    with pytest.raises(UserError, match=f"{old}: has another name now; write {new}$"):
        load_config(DEMO, [f"site={file}"])
