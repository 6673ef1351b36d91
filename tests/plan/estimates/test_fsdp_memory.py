"""What is predicted of an FSDP2 rank's memory, against what real ranks allocate and store.

``tests.helpers.fsdp_memory`` tries more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fsdp_memory
from tests.helpers.distributed import run_ranks
from tests.helpers.fsdp_memory import (
    FAMILIES,
    FULL,
    PEAK_SIZES,
    SELECTIVE,
    SIZES,
    STATE_SIZES,
    FsdpCase,
    folders_for,
)

pytestmark = pytest.mark.ranks

STATES = [
    FsdpCase("qwen2_tied", copies=2),
    FsdpCase("llama", dtype="float32", cp=2),
    FsdpCase("qwen3moe"),  # fewer experts than four ranks
    FsdpCase("dsv3", head="value"),
    FsdpCase("mixtral", optimizer=None),
    FsdpCase("qwen3moe", optimizer="muon"),
]
SHORT = [FsdpCase("qwen3", cp=2), FsdpCase("dsv3", cp=2, cp_method="all_gather")]
PEAKS = [
    FsdpCase("qwen2"),
    FsdpCase("qwen2", memory=FULL),
    FsdpCase("qwen2_tied", memory=FULL),
    FsdpCase("qwen2", memory=(("reshard_after_forward", False),)),
    FsdpCase("qwen2", memory=(*FULL, ("accumulation", "keep"))),
    FsdpCase("qwen3moe", memory=FULL),
]
PLAIN = [FsdpCase(kind, dtype=dtype) for kind in FAMILIES for dtype in ("bfloat16", "float32")]
AGAIN = [replace(case, memory=memory) for case in PLAIN for memory in (FULL, SELECTIVE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp-memory")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[Any]:
    """States of all cases, from four ranks."""
    return run_ranks(fsdp_memory.state_bytes, 4, folders_for(folder / "states", STATES, STATE_SIZES), STATES)


@pytest.fixture(scope="module")
def split(folder: Path) -> list[Any]:
    """Activations of the short cases, from two ranks."""
    return run_ranks(fsdp_memory.activation_bytes, 2, folders_for(folder / "split", SHORT, SIZES), SHORT)


@pytest.mark.parametrize("case", STATES, ids=str)
def test_state_is_predicted_to_the_byte(four: list[Any], case: FsdpCase) -> None:
    found = [rank[STATES.index(case)] for rank in four]
    assert all(measured == predicted for measured, predicted in found), found
    assert all(measured["parameters"] > 0 for measured, _ in found)


@pytest.mark.long
def test_states_on_two_ranks_are_predicted_to_the_byte(folder: Path) -> None:
    ranks = run_ranks(fsdp_memory.state_bytes, 2, folders_for(folder / "two", STATES, STATE_SIZES), STATES)
    for case, found in zip(STATES, zip(*ranks, strict=True), strict=True):
        assert all(measured == predicted for measured, predicted in found), (case, found)


@pytest.mark.long
def test_states_in_8_bits_are_predicted_to_the_byte(folder: Path) -> None:
    pytest.importorskip("torchao")
    cases = [FsdpCase("llama3", optimizer="adamw8bit")]
    for rank in run_ranks(fsdp_memory.state_bytes, 2, folders_for(folder / "eight", cases, STATE_SIZES), cases):
        for measured, predicted in rank:
            assert measured == predicted
            assert measured["moments"] < measured["parameters"]


@pytest.mark.long
def test_peaks_of_updates_are_predicted_from_above_within_a_quarter(folder: Path) -> None:
    """Gathered weights, whole gradients and all temporary tensors included."""
    ranks = run_ranks(fsdp_memory.update_peaks, 2, folders_for(folder / "peaks", PEAKS, PEAK_SIZES), PEAKS)
    for case, (found, *_) in zip(PEAKS, zip(*ranks, strict=True), strict=True):
        measured, predicted = found
        assert measured <= predicted < 1.25 * measured, (case, predicted / measured)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_activations_are_predicted_within_a_twentieth(split: list[Any], case: FsdpCase) -> None:
    _check([rank[SHORT.index(case)] for rank in split], case)


@pytest.mark.long
def test_activations_of_every_family_are_predicted_within_a_twentieth(folder: Path) -> None:
    cases = [*PLAIN, *AGAIN]
    (found,) = run_ranks(fsdp_memory.activation_bytes, 1, folders_for(folder / "one", cases, SIZES), cases)
    for case, pair in zip(cases, found, strict=True):
        _check([pair], case)


@pytest.mark.long
def test_activations_of_split_sequences_are_predicted_within_a_twentieth(folder: Path) -> None:
    cases = [replace(case, cp=2, cp_method=method) for case in PLAIN for method in ("auto", "all_gather")]
    ranks = run_ranks(fsdp_memory.activation_bytes, 2, folders_for(folder / "many", cases, SIZES), cases)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        _check(found, case)


def _check(found: Any, case: FsdpCase) -> None:
    measured, predicted = (sum(pair[i] for pair in found) for i in (0, 1))
    assert predicted == pytest.approx(measured, rel=0.05), case
