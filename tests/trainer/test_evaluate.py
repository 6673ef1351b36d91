"""``rlhpc eval`` finds what the run itself found with the same weights; a run resumes with its own prompts only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhpc.data import arithmetic
from rlhpc.observe.evaluation import majority, pass_at
from tests.docs.fields import SECTIONS, differences
from tests.helpers.commands import rlhpc
from tests.helpers.runs import complete, records, run, write_config

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]
SAMPLES, PROMPTS = 4, 8


def odd_length(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """What a model of random weights does half of the time."""
    return float(len(solution_str) % 2)


odd_length.answer = lambda text: text[:1]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of one step, with two held-out sets, one of them named, and two rewards, of which the
    model reads conversations through its own tokenizer."""
    folder = tmp_path_factory.mktemp("evaluated")
    arithmetic.make(str(folder / "inputs"))
    save_classifier(folder / "inputs" / "model", folder / "reward_model")
    held_out = str(folder / "inputs" / "validation.jsonl")
    config = write_config(
        folder,
        sft=None,
        train__steps=1,
        actor__optimizer__learning_rate=0.01,  # the first step changes the model
        data__validation=[held_out, {"path": held_out, "name": "again"}],
        rewards__0__function="tests.trainer.test_evaluate:odd_length",
        rewards__1={"model": str(folder / "reward_model"), "weight": 1e-3, "own_tokenizer": True},
        validation={"temperature": 1.0, "samples_per_prompt": SAMPLES, "max_prompts": PROMPTS, "success": 0.5},
        observe={"samples": 3},
    )
    complete(config)
    return config


def save_classifier(model: Path, folder: Path) -> None:
    """A reward model of the policy's shape."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config.num_labels = 1
    torch.manual_seed(5)
    transformers.Qwen2ForSequenceClassification(config).float().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / file, folder)


def test_weight_syncs_of_validations_make_no_policy_version(finished: Path) -> None:
    """There is one before the step and one after it."""
    (folder,) = (finished.parent / "run" / "checkpoints").glob("step-*")
    assert json.loads((folder / "state.json").read_text())["state"]["policy_version"] == 1


def evaluate(config: Path, *options: str) -> str:
    done = rlhpc("eval", config, *options, cwd=config.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def validation_of(record: dict[str, Any]) -> dict[str, float]:
    part = "validation/"
    return {name.removeprefix(part): value for name, value in record.items() if name.startswith(part)}


def test_a_checkpoint_is_found_as_good_as_its_run_found_it(finished: Path) -> None:
    run_dir = finished.parent / "run"
    shown = evaluate(finished, "--run", str(run_dir))
    (folder,) = (run_dir / "eval").iterdir()
    found = json.loads((folder / "metrics.json").read_text())
    assert folder.name == "step-00000001"
    assert (found["step"], found["prompts"], found["samples_per_prompt"]) == (1, 2 * PROMPTS, SAMPLES)
    expected = validation_of(records(run_dir)[-1])
    assert found["metrics"] == expected != validation_of(records(run_dir)[0])
    assert set(expected) >= {"reward_mean", "mean@4", "pass@1", "pass@2", "pass@4", "maj@4", "by_set/again/maj@4"}
    assert f"| pass@4             | {expected['pass@4']:.4g}" in shown
    assert not list(folder.glob("checkpoints/step-*"))

    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * PROMPTS * SAMPLES
    assert all(abs(sample["parts"]["model"]) > 1e-6 for sample in samples)
    groups = [samples[i : i + SAMPLES] for i in range(0, len(samples), SAMPLES)]
    assert all(len({sample["prompt"] for sample in group}) == 1 for group in groups)
    for n in (1, 2, 4):
        by_hand = [pass_at(n, sum(sample["correct"] for sample in group), SAMPLES) for group in groups]
        assert expected[f"pass@{n}"] == pytest.approx(sum(by_hand) / len(by_hand))
    votes = [majority([(sample["answer"], sample["correct"]) for sample in group]) for group in groups]
    assert expected["maj@4"] == pytest.approx(sum(votes) / len(votes))
    assert all(sample["answer"] == sample["response"][:1] for sample in samples)
    assert 0 < expected["maj@4"] < 1
    # The first few of them were kept in training too.
    kept = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample for sample in kept if sample["step"] == 1] == samples[:3]


def test_a_huggingface_folder_is_found_as_good_as_a_run_from_it_found_it(finished: Path) -> None:
    model = finished.parent / "inputs" / "model"
    shown = evaluate(finished, "--model", str(model), "--name", "before", "--json")
    found = json.loads((finished.parent / "eval" / "before" / "metrics.json").read_text())
    assert json.loads(shown) == found
    assert not differences(SECTIONS["`rlhpc eval`"], found)
    assert (found["step"], found["model"]) == (0, str(model))
    assert found["metrics"] == validation_of(records(finished.parent / "run")[0])


def test_a_run_does_not_go_on_with_other_prompts(finished: Path) -> None:
    code, output = run(finished, "--resume", "train.steps=2", "data.shuffle=false")
    assert code == 2, output
    assert "(resources.ranks_per_node is not set)" in output
    errors = [line for line in output.splitlines() if line.startswith("rlhpc: ")]
    assert len(errors) == 1, output
    assert errors[0].startswith("rlhpc: data.train: the training prompts differ from those that the run began with")
