"""The first minute of a job: every rank is refused a model that the FSDP back end cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.plain_model import write_inputs

pytestmark = pytest.mark.ranks


def _refusal(config: Path) -> str:
    from rlhpc.config.load import load_config
    from rlhpc.core.errors import UserError
    from rlhpc.trainer.architecture import check_architecture

    try:
        check_architecture(load_config(config, ["train.backend=fsdp"]))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("model_type", "refused"), [("qwen2", ""), ("bamba", "packed documents influence each other")])
def test_all_ranks_have_the_proof_of_the_first(tmp_path: Path, model_type: str, refused: str) -> None:
    found = run_ranks(_refusal, 2, write_inputs(tmp_path, model_type=model_type))
    assert found[0] == found[1]
    assert refused in found[0]
    assert bool(found[0]) == bool(refused)
    assert "\n" not in found[0]
