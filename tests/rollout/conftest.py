"""Models of the engines' tests, and what an engine without guesses generates with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.heads import make_policy
from tests.helpers.tiny_models import KINDS, make_model
from tests.rollout.engines import CHANGES, CONTEXT, VOCAB
from tests.rollout.guesses import Plain, without_guesses
from tests.rollout.test_sampling_options import add_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<family>/<a|b>``: two sets of weights of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family in KINDS:
        for seed, letter in enumerate("ab"):
            changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **CHANGES.get(family, {})}
            make_model(folder / family / letter, family, seed, **changes)
    return folder


@pytest.fixture(scope="session")
def policy(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with a tokenizer, whose head is sharpened by ``guesses.sharp``."""
    path = tmp_path_factory.mktemp("policy") / "model"
    shutil.copytree(models / "qwen2" / "a", path)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights whose last tokens' distributions have nothing in common."""
    folder = tmp_path_factory.mktemp("policies")
    return [make_policy(folder / name, seed, VOCAB) for seed, name in enumerate("ab")]


@pytest.fixture(scope="session")
def plain(policy: Path, policies: list[Path]) -> Plain:
    """Responses without guesses, for the tests of all ways of guessing."""
    return run_ranks(without_guesses, 1, policy, policies)[0]
