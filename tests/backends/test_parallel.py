"""Every family on every axis, against HuggingFace's model trained by PyTorch on one rank; checkpoints across layouts.

``python -m tests.helpers.equality`` tries many more layouts than these.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, Distance, actor, make_reference, try_cases
from tests.helpers.tiny_models import KINDS, OUTSIDE, make_model
from tests.helpers.training import (
    TOKENS,
    build_actor,
    digest,
    negative_log_likelihood,
    optimizer_section,
    sequences,
    train,
)

pytestmark = pytest.mark.ranks

ON_EIGHT_RANKS = (
    Case("llama3", tp=2, pp=2, vpp=2),
    Case("qwen2", pp=2, cp=2, first_stage_layers=1, last_stage_layers=3, cp_method="ulysses"),
    Case("qwen3moe", tp=2, pp=2, vpp=2, ep=2),
    Case("dsv3", tp=2, pp=2, cp=2, ep=4),
)
MORE_ON_EIGHT_RANKS = (
    Case("qwen2", tp=2, sequence_parallel=False),
    Case("qwen3", tp=2, pp=2, cp=2, expert_dispatch="allgather"),  # has no experts to dispatch to
    Case("mixtral", pp=2, ep=2, etp=2),
    Case("dsv3_direct", tp=2, cp=2, cp_method="ulysses", ep=4),
    Case("llama", tp=4),
    Case("qwen2_tied", tp=2, pp=4),
    Case("mixtral", tp=2, ep=4),
    Case("qwen3moe", cp=2, ep=2, etp=2, expert_dispatch="allgather"),
    Case("dsv3", tp=2, pp=2, ep=2, etp=2, expert_dispatch="allgather"),
    Case("mistral", tp=2, pp=2, cp=2),
    Case("dsv3_direct", tp=4, pp=2, vpp=2, ep=2, etp=2, expert_dispatch="allgather"),  # slow to receive
)

# From and to: every axis changes somewhere.
Moves = tuple[tuple[Case, Case], ...]
MOVES: Moves = ((Case("qwen3moe", tp=2, pp=2, vpp=2, ep=4), Case("qwen3moe", cp=2, ep=2, etp=2)),)
MORE_MOVES: Moves = (
    (Case("qwen2_tied", pp=2, vpp=2, tp=2), Case("qwen2_tied", cp=4)),
    (Case("qwen3", tp=2, pp=2, cp=2), Case("qwen3", tp=4, pp=2, vpp=None)),
    (Case("dsv3", ep=4), Case("dsv3", tp=2, pp=2, first_stage_layers=1, last_stage_layers=3, ep=2)),
)


@pytest.fixture(scope="session")  # sharing models brings no test into a tier
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return run_ranks(_make_references, 1, tmp_path_factory.mktemp("references"), join=False)[0]


def test_one_rank_equals_huggingface_and_torch_adamw(references: dict[str, Path]) -> None:
    """Logits, losses, gradients and the weights after three clipped AdamW steps; one family is a user's."""
    _all_near([Case(kind) for kind in (*KINDS, *OUTSIDE)], references, 1)


def test_every_axis_and_combination_equals_one_rank(references: dict[str, Path]) -> None:
    _all_near(ON_EIGHT_RANKS, references, 8)


@pytest.mark.long
def test_more_combinations_equal_one_rank(references: dict[str, Path]) -> None:
    _all_near(MORE_ON_EIGHT_RANKS, references, 8)


@pytest.mark.parametrize("moves", [MOVES, pytest.param(MORE_MOVES, marks=pytest.mark.long)], ids=["some", "more"])
def test_a_checkpoint_continues_in_another_layout(references: dict[str, Path], tmp_path: Path, moves: Moves) -> None:
    """The losses after the move equal those of the run that stayed."""
    for pairs in run_ranks(_move, 8, references, moves, tmp_path, timeout=900):
        for move, (stayed, moved) in zip(moves, pairs, strict=True):
            for (loss, norm), (moved_loss, moved_norm) in zip(stayed, moved, strict=True):
                assert moved_loss == pytest.approx(loss, rel=1e-5), move
                assert moved_norm == pytest.approx(norm, rel=1e-4), move


def test_a_checkpoint_continues_bit_equal_in_the_same_layout(references: dict[str, Path], tmp_path: Path) -> None:
    case, start = Case("dsv3", tp=2, ep=2), references["dsv3"] / "start"
    stayed = run_ranks(_save_and_go_on, 2, start, case, tmp_path)
    assert run_ranks(_load_and_go_on, 2, start, case, tmp_path) == stayed


def _make_references(folder: Path) -> dict[str, Path]:
    return {kind: make_reference(folder / kind, kind) for kind in (*KINDS, *OUTSIDE)}


def _save_and_go_on(start: Path, case: Case, saved: Path) -> list[tuple[float, float]]:
    backend = actor(start, case, optimizer_section())
    train(backend, 2)
    backend.save(saved)
    return train(backend, 2)


def _load_and_go_on(start: Path, case: Case, saved: Path) -> list[tuple[float, float]]:
    backend = actor(start, case, optimizer_section())
    backend.load(saved)
    return train(backend, 2)


def _all_near(cases: tuple[Case, ...] | list[Case], references: dict[str, Path], world_size: int) -> None:
    far: dict[str, Distance] = {}
    for distances in run_ranks(try_cases, world_size, references, cases, timeout=900):
        far.update({str(case): d for case, d in zip(cases, distances, strict=True) if not d.is_small})
    assert not far


def _move(
    references: dict[str, Path], moves: Moves, folder: Path
) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]:
    """(loss, gradient norm) of two steps after a save: by the run that saved, and by one that loaded it elsewhere."""
    import torch.distributed as dist

    results = []
    for number, (before, after) in enumerate(moves):
        saved, start = folder / str(number), references[before.kind] / "start"
        if dist.get_rank() == 0:
            saved.mkdir()
        backend = actor(start, before, optimizer_section())
        train(backend, 2)
        dist.barrier()
        backend.save(saved)
        stayed = train(backend, 2)
        backend = actor(start, after, optimizer_section())
        backend.load(saved)
        results.append((stayed, train(backend, 2)))
    return results


@pytest.mark.parametrize("axes", [{"pp": 2, "tp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}], ids=str)
def test_batches_of_all_lengths_are_received_without_an_exchange(tmp_path: Path, axes: dict[str, int]) -> None:
    """1F1B and interleaved stages, updates and log-prob passes; from one microbatch to more than all stages."""
    model = make_model(tmp_path / "model", "qwen3", num_hidden_layers=4)
    for found in run_ranks(_look, 2 if axes.get("vpp") else 4, model, axes):
        for count, (known, exchanged) in found.items():
            assert known["results"] == exchanged["results"], count
            assert known["shapes sent"] == 0
        assert sum(exchanged["shapes sent"] for _, exchanged in found.values()) > 0


def _look(model: Path, axes: dict[str, int]) -> dict[int, list[dict[str, Any]]]:
    from rlhpc.backends.megatron import backend

    exchange = mock.patch.object(backend, "known_shapes", return_value=contextlib.nullcontext())
    actor = build_actor(model, optimizer_section(), **axes)
    found: dict[int, list[dict[str, Any]]] = {}
    for count in (1, 7):
        found[count] = []
        for knows in (contextlib.nullcontext(), exchange):
            with knows:
                found[count].append(_update(actor, model, count))
    return found


def _update(actor: Any, model: Path, count: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from rlhpc.data.collate import pack_batch

    actor.load_pretrained(model)
    parts = [sequences()[i::count] for i in range(count)]
    batches = [pack_batch([(one.numpy(), 1) for one in part], sample_ids=range(len(part))) for part in parts]
    sent, send = [], dist.batch_isend_irecv

    def noted(operations: list[Any]) -> Any:
        sent.extend(one for one in operations if one.tensor.dtype == torch.int64 and one.op is dist.isend)
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", noted):
        stats = [actor.train(batches, negative_log_likelihood, TOKENS, 1.0, 1e-3) for _ in range(2)]
        passes = actor.log_probs(batches, 1.0)
    results = [(one.sums["loss"], one.grad_norm) for one in stats], [one.log_probs.tolist() for one in passes]
    return {"results": (*results, digest(actor)), "shapes sent": len(sent)}
