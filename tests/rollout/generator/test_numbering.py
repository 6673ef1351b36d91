"""Numbers of samples that seed groups."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.data.files import Mixture
from rlhpc.data.prompts import Prompts, PromptSet
from rlhpc.rollout.generator.numbering import Numbering, StepGroups
from rlhpc.rollout.requests import first_samples
from tests.rollout.generator.values import prompt

COUNT = 4


def prompt_set(size: int, mixture: Mixture | None = None) -> PromptSet:
    rows = [prompt(number) for number in range(size)]
    files = (range(size),) if mixture is None else (range(2), range(2, size))
    return PromptSet(
        Prompts(rows, np.zeros(size, np.int32), np.arange(size + 1)), 0, files, ("",) * len(files), mixture
    )


@pytest.mark.parametrize(("size", "per_step", "origin"), [(5, 4, 0), (3, 8, 16), (8, 8, 3)])
def test_without_a_filter_they_are_those_of_a_step_on_all_ranks(size: int, per_step: int, origin: int) -> None:
    prompts = prompt_set(size)
    numbering = Numbering(prompts, 7, COUNT, StepGroups(3, origin, per_step))
    cursor = origin
    for step in range(3, 7):
        taken, after = prompts.take(cursor, per_step, 7)
        expected = first_samples([prompt.prompt_id for prompt in taken], COUNT)
        assert [numbering.first_sample(number) for number in range(cursor, after)] == expected
        assert {numbering.step(number, version=2) for number in range(cursor, after)} == {step}
        cursor = after


@pytest.mark.parametrize("mixture", [None, Mixture([3.0, 1.0])], ids=["one file", "mixture"])
def test_with_a_filter_a_prompt_s_samples_count_from_the_beginning(mixture: Mixture | None) -> None:
    prompts = prompt_set(6, mixture)
    numbering = Numbering(prompts, 7, COUNT)
    taken, _ = prompts.take(0, 40, 7)
    expected = first_samples([prompt.prompt_id for prompt in taken], COUNT)
    assert [numbering.first_sample(number) for number in range(40)] == expected
    assert numbering.step(17, version=2) == 2
