"""Every lever of memory at once, on tensor, pipeline with virtual stages, and expert axes: not a bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, digest, make_actor, optimizer_section, save, train

pytestmark = pytest.mark.ranks

AXES = {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}
LEVERS = {
    "recompute": "full",
    "offload_activations": True,
    "offload": {"parameters": True, "gradients": True, "optimizer": True, "fraction": 0.7},
}


def test_all_levers_together_change_no_bit_and_resume(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "dsv3", num_hidden_layers=4)
    for plain, levers, resumed in run_ranks(_compare, 4, model, tmp_path / "saved"):
        assert levers == plain
        assert resumed == plain[1:]


def _compare(model: Path, saved: Path) -> tuple[list[Any], list[Any], list[Any]]:

    from rlhpc.config.training import MemorySection

    plain = make_actor(model, optimizer_section(), **AXES)
    expected = [*_steps(plain, 2), digest(plain)]

    memory, section = MemorySection(**LEVERS), optimizer_section(optimizer_offload_fraction=0.5)
    actor = make_actor(model, section, memory, **AXES)
    found = _steps(actor, 1)
    share = save(actor, saved, asynchronous=True)
    found += [*_steps(actor, 1), digest(actor)]
    share.finish()

    again = make_actor(model, section, memory, **AXES)
    again.load(saved)
    return expected, found, [*_steps(again, 1), digest(again)]


def _steps(actor: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        actor.offload()
        log_probs = [float(stats.log_probs.sum()) for stats in actor.log_probs(batches_of(actor), 1.0)]
        found.append((log_probs, train(actor)))
    return found
