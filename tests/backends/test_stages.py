"""Pipeline stages that know the shapes of what they receive: as when they exchange them, without those messages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import TOKENS, build_actor, digest, negative_log_likelihood, optimizer_section, sequences

pytestmark = pytest.mark.ranks


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
