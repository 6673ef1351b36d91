"""A model folder with a tokenizer made of the demo's characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.data import DataSection
from rlhpc.data import arithmetic
from rlhpc.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "inputs"
    arithmetic.make(str(folder), seed=3)
    return folder


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.load(demo_folder / "model", vocab_size=16, section=DataSection())
