"""Folders of random models, read by transformers and by the checks of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.shapes import END_TOKEN, SHAPES, model_fields, model_shape, write_model
from rlhpc.checkpoint.formats.model_folder import check_tokenizer, check_weights
from rlhpc.config.data import DataSection
from rlhpc.models import read_model
from rlhpc.sharding.shards import num_parameters

# Billions of parameters, as published.
PUBLISHED = {"1.5b": 1.54, "8b": 8.03, "30b-a3b": 30.5, "16b-a3b-mla": 16.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert num_parameters(model_shape(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_shape_is_cut_to_its_first_layers() -> None:
    shape = model_shape("30b-a3b", 2)
    assert shape.num_layers == 2
    assert shape.experts is not None
    assert shape.experts.layers == (0, 1)
    assert model_fields("30b-a3b")["num_hidden_layers"] == SHAPES["30b-a3b"]["num_hidden_layers"] == 48


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-mla"])
def test_transformers_reads_the_weights(name: str, tmp_path: Path) -> None:
    """The files have exactly the model's tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path, name, dtype="float32")
    assert read_model(folder) == model_shape(name)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        num_parameters(model_shape(name)), abs=64
    ), "a bias of experts is a buffer there"
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.norm.weight.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-mla", "8b"])
def test_a_run_reads_the_tokenizer(name: str, tmp_path: Path) -> None:
    """transformers also chooses its class by family."""
    from rlhpc.data.tokenizer import Tokenizer

    folder = write_model(tmp_path, name, weights=False)
    shape, section = read_model(folder), DataSection()
    check_tokenizer(folder, shape.vocab_size, chat_template=True)
    tokenizer = Tokenizer.load(folder, shape.vocab_size, section)
    assert tokenizer.end_tokens == (END_TOKEN,)
    (prompt,) = tokenizer.encode_prompts(["add 1 and 2"])
    assert len(prompt) == len("add 1 and 2") + 2, "a token for each character, and those of the chat template"
    assert tokenizer.decode(range(100, shape.vocab_size)).startswith("<100><101>"), "any id can be decoded"


@pytest.mark.heavy
def test_large_models_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.shapes._MOST_BYTES", 300_000)
    folder = write_model(tmp_path, "tiny")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    check_weights(folder, read_model(folder))
