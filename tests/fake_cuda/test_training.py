"""The Megatron back end as on a GPU: its tensors all on the device, what it gives away, and the numbers of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_cuda.part_runs import install_flash_attention
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.parts import bytes_by_storage, chunks_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, build_actor, make_actor, optimizer_section, train

pytestmark = pytest.mark.ranks

EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fake_cuda")
    return run_ranks(_look, 1, make_model(folder / "model", "qwen3moe"), folder / "saved", join=False)[0]


def test_everything_of_the_model_is_on_the_device(found: dict[str, Any]) -> None:
    assert found["on the device"] == {"parameters": True, "gradients": True, "optimizer": True, "log-probs": True}
    assert found["backends"][0] == "cpu:gloo,cuda:nccl"


def test_weights_are_in_memory_once_while_the_model_is_built(found: dict[str, Any]) -> None:
    """The modules' own are freed before the buffers of weights and gradients are allocated."""
    assert found["peak of building"] <= 1.05 * found["buffers"]


def test_updates_are_those_of_a_cpu(found: dict[str, Any]) -> None:
    """In bfloat16, up to the rounding of another attention kernel."""
    assert found["kernel calls"] > 0
    assert [loss for loss, _ in found["losses"]] == pytest.approx([loss for loss, _ in found["cpu"]], rel=1e-2)


def test_gradients_are_reduced_while_they_are_computed(found: dict[str, Any]) -> None:
    assert found["overlap"]


def test_nearly_all_memory_is_given_away_and_comes_back(found: dict[str, Any]) -> None:
    assert found["held away"] < 0.2 * found["held"]
    assert found["empty_cache"] > 0


def test_a_resumed_run_is_bit_equal(found: dict[str, Any]) -> None:
    """With the device's random numbers, which the checkpoint holds."""
    assert found["resumed"] == found["losses"][2:]
    assert found["rng restored"]


def _look(model: Path, saved: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from rlhpc.core.rank import RankInfo
    from rlhpc.parallel import groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {"cpu": train(make_actor(model, optimizer_section(), dtype="bfloat16"), 4)}
    _forget_groups()
    groups.leave()
    kernel = install_flash_attention()
    with FakeCuda() as cuda:
        groups.join(RankInfo.from_environ())
        found |= _train(cuda, model, saved)
        found["backends"] = cuda.backends
        found["kernel calls"] = len(kernel.calls)
        found["empty_cache"] = cuda.count("empty_cache")
    return found


def _train(cuda: FakeCuda, model: Path, saved: Path) -> dict[str, Any]:
    from rlhpc.backends.megatron.optimizer import device_tensors
    from rlhpc.config.training import MemorySection
    from rlhpc.parallel.offload import KINDS

    memory = MemorySection(offload=EVERYTHING)
    before = cuda.bytes_held
    torch.cuda.reset_peak_memory_stats()
    actor = build_actor(model, optimizer_section(), memory, "bfloat16")
    found: dict[str, Any] = {"peak of building": torch.cuda.max_memory_allocated() - before}
    buffers = [*device_tensors(actor.models, None, "parameters"), *device_tensors(actor.models, None, "gradients")]
    found["buffers"] = sum(bytes_by_storage(buffers).values())
    actor.load_pretrained(model)
    losses = train(actor, 2)
    found["overlap"] = chunks_of(actor)[0].ddp_config.overlap_grad_reduce
    held = {
        kind: all(tensor.is_cuda for tensor in device_tensors(actor.models, actor.optimizer, kind)) for kind in KINDS
    }
    stats = actor.log_probs(batches_of(actor), 1.0)
    found["on the device"] = held | {"log-probs": all(one.log_probs.is_cuda for one in stats)}
    saved.mkdir()
    actor.save(saved)
    state = torch.cuda.get_rng_state().clone()
    found["held"] = cuda.bytes_held
    actor.offload()
    found["held away"] = cuda.bytes_held
    losses += train(actor, 2)
    torch.cuda.manual_seed(17)
    actor.load(saved)
    found["rng restored"] = bool(torch.equal(torch.cuda.get_rng_state(), state))
    found["losses"], found["resumed"] = losses, train(actor, 2)
    return found


def _forget_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
