"""A user's optimizer that is none is refused by the key that names it."""

from __future__ import annotations

import pytest

from rlhpc.backends.kernels.own_optimizer import make_own
from rlhpc.config.schema import SFTOptimizerSection
from rlhpc.config.training import CriticOptimizerSection, OptimizerSection
from rlhpc.core.errors import UserError


@pytest.mark.parametrize(
    ("section", "model"),
    [(OptimizerSection, "actor"), (CriticOptimizerSection, "critic"), (SFTOptimizerSection, "sft")],
)
def test_the_error_names_the_model_s_own_key(section: type[OptimizerSection], model: str) -> None:
    with pytest.raises(UserError) as caught:
        make_own(section(function="builtins:str"), [], lambda state, param: True, "")
    assert caught.value.where == f"{model}.optimizer.function"
