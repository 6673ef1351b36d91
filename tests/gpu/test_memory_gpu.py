"""Memory levers on one GPU: what is let go is free, and the numbers are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}


def test_levers_on_a_gpu(tmp_path: Path) -> None:
    """One process for all: offload and a save in the background change no bit, the host's share little."""
    model = make_model(tmp_path / "model", "qwen3", hidden_size=512, intermediate_size=2048)
    (found,) = run_ranks(_look, 1, model, tmp_path / "saved", join=False)
    assert found["offloaded"] == found["plain"]
    assert found["resumed"] == found["plain"][2:]
    assert found["left"] < 0.1 * found["held"], "what stays are tables and workspaces"
    assert found["free for others"] >= 0.9 * (found["held"] - found["left"])
    assert found["optimizer"] == {("cpu", True)}
    assert [loss for loss, _ in found["host"]] == pytest.approx([loss for loss, _ in found["plain"]], rel=1e-3)


def _look(model: Path, saved: Path) -> dict[str, Any]:
    from rlhpc.backends.megatron.optimizer import inner_optimizers
    from rlhpc.config.schema import MemorySection
    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel.groups import join

    join(RankInfo.from_environ())
    found: dict[str, Any] = {}
    actor = make_actor(model, optimizer_section(host_fraction=1.0), dtype="bfloat16")
    found["host"] = train(actor, 4)
    (inner,) = inner_optimizers(actor._optimizer)
    own = [value for state in inner.state.values() for value in state.values()]
    assert {name for state in inner.state.values() for name in state} == {"exp_avg", "exp_avg_sq", "master_param"}
    found["optimizer"] = {(value.device.type, value.is_pinned()) for value in own}
    actor = make_actor(model, optimizer_section(), dtype="bfloat16")
    found["plain"] = train(actor, 4)
    del actor, inner, own

    memory = MemorySection(offload=EVERYTHING)
    actor = make_actor(model, optimizer_section(), memory, "bfloat16")
    found["offloaded"] = train(actor, 2)
    saved.mkdir()
    share = actor.save(saved, asynchronous=True)
    torch.cuda.synchronize()
    found["held"], before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    actor.offload()
    found["left"], after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found["free for others"] = after - before
    found["offloaded"] += train(actor, 2)
    share.finish()
    actor.load(saved)
    found["resumed"] = train(actor, 2)
    return found
