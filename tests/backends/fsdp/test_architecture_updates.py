"""Cases of the script that trains every architecture which the proof accepts."""

from __future__ import annotations

import pytest

from tests.backends.fsdp.architecture_updates import try_kind

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", ["gpt_neox", pytest.param("gemma3", marks=pytest.mark.long)])
def test_models_whose_files_are_converted_by_their_class(kind: str) -> None:
    """FSDP gives the model another class."""
    found = try_kind(kind)
    assert found["equal"], found
