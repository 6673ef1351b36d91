from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_models import KINDS, make_model
from tests.rollout.engines import CHANGES, CONTEXT, VOCAB


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<family>/<a|b>``: two sets of weights of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family in KINDS:
        for seed, letter in enumerate("ab"):
            changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **CHANGES.get(family, {})}
            make_model(folder / family / letter, family, seed, **changes)
    return folder
