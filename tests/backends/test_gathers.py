"""New weights that arrive during the next forward pass: the same to the bit, whoever reads them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.parts import gathers_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, digest, make_actor, optimizer_section, save, train

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank. Gathers run as late as they can: when something waits for them."""
    folder = tmp_path_factory.mktemp("gathers")
    return run_ranks(_look, 2, make_model(folder / "model", "qwen3moe", num_hidden_layers=3), folder)


def test_updates_are_those_of_weights_that_are_waited_for(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["late"] == rank["waited for"]
        assert rank["late"]["losses"][0] != rank["late"]["losses"][-1]


def test_an_update_does_not_wait_for_its_weights(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["pending"]["late"] > 3
        assert rank["pending"]["waited for"] == 0


def test_whatever_reads_weights_waits_for_them(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["left"] == dict.fromkeys(rank["left"], 0)
        assert len(rank["left"]) == 8


def _look(model: Path, folder: Path) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from rlhpc.backends.megatron import optimizer

    gather, found = _ParamAndGradBucketGroup.start_param_sync, {"pending": {}}

    class Late:
        def __init__(self, group: Any) -> None:
            self.group = group

        def wait(self) -> None:
            self.group.param_gather_handle = None
            gather(self.group, force_sync=True)

    def start(group: Any, force_sync: bool = False) -> None:
        if group.ddp_config.overlap_param_gather:
            group.param_gather_handle = Late(group)
        else:
            gather(group, force_sync)

    def with_small_buckets(**options: Any) -> Any:
        return DistributedDataParallelConfig(**{**options, "bucket_size": 2000})

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", start),
        mock.patch.object(optimizer, "DistributedDataParallelConfig", with_small_buckets),
    ):
        for name in ("late", "waited for"):
            with mock.patch.object(optimizer, "_gathers_overlap", return_value=name == "late"):
                found[name], found["pending"][name] = _train(model, folder / name)
        found["left"] = _read(model, folder)
    return found


def _train(model: Path, folder: Path) -> tuple[dict[str, Any], int]:
    """Updates, after passes, saves and offload between them; gathers left after the first."""
    from rlhpc.config.training import MemorySection

    offload = {"parameters": True, "gradients": True, "optimizer": True}
    actor = make_actor(model, optimizer_section(), MemorySection(offload=offload), "bfloat16", ep=2)
    losses = train(actor, 1)
    pending = gathers_of(actor).pending
    losses += train(actor, 1)
    passes = [one.log_probs.tolist() for one in actor.log_probs(batches_of(actor), 1.0)]
    losses += train(actor, 1)
    actor.offload()
    losses += train(actor, 1)
    save(actor, folder)
    losses += train(actor, 1)
    before = digest(actor)
    actor.load(folder)
    return {"losses": losses, "passes": passes, "saved": digest(actor), "weights": before}, pending


def _read(model: Path, folder: Path) -> dict[str, int]:
    """Gathers left after each way to read the weights."""
    actor, copy = (make_actor(model, optimizer_section(), None, "bfloat16", ep=2) for _ in range(2))
    ways = {
        "view": lambda: actor.view(actor.shards()[0]),
        "full_tensors": lambda: actor.full_tensors(),
        "has_finite_weights": actor.has_finite_weights,
        "save": lambda: save(actor, folder / "read"),
        "copy_weights": lambda: copy.copy_weights(actor),
        "settle": actor.settle,
        "offload": actor.offload,
        "reset_optimizer": actor.reset_optimizer,
    }
    left = {}
    for name, read in ways.items():
        train(actor, 1)
        assert gathers_of(actor).pending > 0
        read()
        left[name] = gathers_of(actor).pending
    return left
