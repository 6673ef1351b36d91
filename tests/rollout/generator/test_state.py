"""An engine's part of a checkpoint, numbers of samples, and looks at the board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from rlhpc.core.errors import PeerLost, ReshardError, UserError
from rlhpc.data.files import Mixture
from rlhpc.data.prompts import Prompts, PromptSet
from rlhpc.rollout.generator.lead import look_seconds
from rlhpc.rollout.generator.numbering import Numbering, StepGroups
from rlhpc.rollout.generator.parts import EnginePlace
from rlhpc.rollout.generator.shelf import GREEDY, HeldGroup, Shelf
from rlhpc.rollout.generator.state import EngineState, InFlightResponse, held_groups, load_state, taken_over
from rlhpc.rollout.requests import first_samples
from rlhpc.rollout.schedule.terms import Costs, Terms
from tests.helpers.distributed import run_ranks
from tests.rollout.generator.values import blank_group, prompt, response, scored

TERMS = Terms(2, 4, 1, 8, 16, Costs(1, 0, 1))


def groups(numbers: range) -> tuple[HeldGroup, ...]:
    """Finished, in flight with a draft, and blank ones with a greedy response."""
    shelf = Shelf(bool)
    for number in numbers:
        shelf.add(HeldGroup(blank_group(number), blank_group(number, count=1) if number % 3 == 2 else None))
        if number % 3 == 0:
            shelf.put([scored(number, 0, 1.0, tool_calls=2, failures=("died",)), scored(number, 1)])
        if number % 3 == 1:
            held = shelf.held[number]
            shelf.held[number] = held.with_response(0, response(number, 2), scored=False)
    return tuple(shelf.held.values())


def state(engine: int, engines: int, numbers: range) -> EngineState:
    in_flight = [InFlightResponse(number, index) for number in numbers if number % 3 == 1 for index in (1, 0)]
    in_flight += [InFlightResponse(n, GREEDY, True, 3, 1) for n in numbers if n % 3 == 2]
    late_ends, late_calls = (numbers[0],), ((numbers[2], 1),)
    return EngineState(4, engine, engines, {"clock": 15}, tuple(in_flight), groups(numbers), late_ends, late_calls)


def plain(held: HeldGroup) -> tuple[object, ...]:
    groups = [group for group in (held.group, held.greedy) if group is not None]
    samples = [
        (sample.tokens.tolist(), sample.log_probs.tolist(), sample.reward)
        for group in groups
        for sample in group.samples
    ]
    counts = (held.tool_calls, held.failed_tool_calls, dict(held.reward_failures), held.keeps)
    return (held.group.number, [(group.scored, group.dropped) for group in groups], samples, counts)


def test_a_state_is_read_bit_for_bit(tmp_path: Path) -> None:
    states = [state(0, 2, range(0, 12, 2)), state(1, 2, range(1, 12, 2))]
    for written in states:
        written.save(tmp_path)
    for engine, written in enumerate(states):
        found = load_state(tmp_path, engine, TERMS)
        assert found is not None
        assert [plain(held) for held in found.groups] == [plain(held) for held in written.groups]
        assert found.in_flight == written.in_flight
        assert (found.late_ends, found.late_calls) == (list(written.late_ends), written.late_calls)
        assert (found.version, found.engine, found.engines, found.schedule) == (4, written.engine, 2, {"clock": 15})
        assert found.groups[0].group.samples[0].tokens.dtype == np.int32


def test_only_engines_that_resume_hold_groups_of_a_checkpoint(tmp_path: Path) -> None:
    """One that joins later begins without any, whoever wrote them."""
    for written in (state(0, 2, range(0, 12, 2)), state(1, 2, range(1, 12, 2))):
        written.save(tmp_path)
    assert held_groups(tmp_path, 2, 2) == [*range(12)]
    assert held_groups(tmp_path, 2, 1) == [*range(0, 12, 2)]
    assert held_groups(tmp_path, 3, 2) == [number for number in range(12) if number % 3 < 2]
    assert held_groups(tmp_path, 2, 0) == []


def test_a_checkpoint_of_a_run_whose_ranks_generate_and_train_has_none(tmp_path: Path) -> None:
    assert load_state(tmp_path, 0, TERMS) is None


@pytest.mark.parametrize(
    ("staleness", "groups", "earlier", "where"),
    [
        (1, 4, (1, 4), None),
        (2, 8, (1, 4), None),
        (1, 2, (0, 4), None),  # at staleness 0 no group of a later step has begun
        (0, 4, (1, 4), "asynchrony.max_staleness"),
        (1, 3, (1, 4), "train.prompts_per_step"),
    ],
)
def test_groups_that_would_be_too_old_are_refused(
    staleness: int, groups: int, earlier: tuple[int, int], where: str | None, tmp_path: Path
) -> None:
    written = replace(state(0, 1, range(3)), max_staleness=earlier[0], groups_per_step=earlier[1])
    written.save(tmp_path)
    terms = replace(TERMS, engines=1, max_staleness=staleness, groups_per_step=groups)
    if where is None:
        assert load_state(tmp_path, 0, terms) is not None
        return
    with pytest.raises(UserError) as raised:
        load_state(tmp_path, 0, terms)
    assert raised.value.where == where


def test_a_state_is_not_written_into_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state(0, 1, range(3)).save(tmp_path / "step-00000004")


@pytest.mark.parametrize("engines", [1, 3])
def test_other_engines_take_over_every_group_and_every_request_once(engines: int) -> None:
    states = [state(0, 2, range(0, 24, 2)), state(1, 2, range(1, 24, 2))]
    taken = [taken_over(states, engine, engines) for engine in range(engines)]
    numbers = [[held.group.number for held in found.groups] for found in taken]
    assert numbers == [list(range(engine, 24, engines)) for engine in range(engines)]
    before = {response for found in states for response in found.in_flight}
    after = [response for found in taken for response in found.in_flight]
    assert set(after) == before
    assert len(after) == len(before)
    for found in taken:
        waits = [response.calls for response in found.in_flight]
        assert waits == sorted(waits), "what waits for tools is last"
        assert all(response.group % engines == found.engine for response in found.in_flight)


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


_READS_A_SECOND = 4000  # that the job's store answers on one core, for 31 keys each


@pytest.mark.parametrize("engines", [1, 4, 32, 96])
@pytest.mark.parametrize("waited", [0.0, 0.1, 100.0])
def test_engines_that_wait_together_leave_the_store_half_of_its_time(engines: int, waited: float) -> None:
    assert engines / look_seconds(engines, waited) <= _READS_A_SECOND / 2


def test_a_few_engines_look_often() -> None:
    assert look_seconds(1, 0.0) == look_seconds(2, 0.0) == 0.001
    assert look_seconds(2, 0.5) == pytest.approx(0.025)


def lost() -> None:
    """As a thread's loss of a rank reaches the main one."""
    try:
        raise PeerLost("rank 0 is gone")
    except PeerLost as error:
        raise ReshardError("receiving weights: rank 0 is gone") from error


@pytest.mark.ranks
def test_all_ranks_of_an_engine_raise_what_one_has_met() -> None:
    for rank, (found, first, agreed, other) in enumerate(run_ranks(_meet, 3)):
        assert found == 7
        assert first == "TrainersLost: receiving weights: rank 0 is gone"
        assert agreed == "TrainersLost: rank 0 is gone"
        assert other == ("ReshardError: receiving weights: rank 0 is gone" if rank == 1 else "")


def _meet() -> tuple[object, str, str, str]:
    rank, group = dist.get_rank(), dist.new_group(range(3), backend="gloo")
    place = EnginePlace(0, 1, leads=rank == 0, group=group, outlives=True)

    def refuse() -> int:
        raise PeerLost("rank 0 is gone")

    bound = EnginePlace(0, 1, leads=rank == 0, group=group)
    return (
        place.agreed(lambda: 7),
        said(lambda: place.together(lost if rank == 1 else lambda: None)),
        said(lambda: place.agreed(refuse)),
        said(lambda: bound.together(lost if rank == 1 else lambda: None)),
    )


def said(action: Callable[[], object]) -> str:
    """The error that an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_another_error_is_no_loss_of_the_trainers() -> None:
    place = EnginePlace(0, 1, leads=True, outlives=True)
    with pytest.raises(BrokenPipeError):
        place.agreed(lambda: (_ for _ in ()).throw(BrokenPipeError("a reward worker ended")))
