"""The optimizer's state in checkpoints: Megatron's own format, written and read without gathering any of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.profiler import ProfilerActivity, profile

from rlhpc.backends.megatron.checkpoint import ModelCheckpoint, optimizer_parts, owned_state
from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from rlhpc.parallel.compat import megatron_device
from tests.helpers.distributed import run_ranks
from tests.helpers.parts import gathers_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section, train

pytestmark = pytest.mark.ranks

CASES = (
    (2, {}),
    pytest.param((4, {"ep": 2}), marks=pytest.mark.long),
    pytest.param((4, {"tp": 2, "etp": 2}), marks=pytest.mark.long),
)


@pytest.fixture(scope="module", params=CASES, ids=str)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """All that is looked at, from ranks that share dense parameters and experts."""
    ranks, axes = request.param
    model = make_model(tmp_path_factory.mktemp("model"), "dsv3", vocab_size=4000, hidden_size=96)
    return run_ranks(_look, ranks, model, tmp_path_factory.mktemp("saved"), axes)


def test_a_checkpoint_is_the_one_that_megatron_writes(found: list[dict[str, Any]]) -> None:
    """Every tensor by key, shape and bits, and what the ranks have in common."""
    ours, theirs = found[0]["ours"], found[0]["megatron's"]
    assert ours == theirs
    assert sum(key.startswith("optimizer.state.") for key in ours) > 3 * 20


def test_megatron_loads_it(found: list[dict[str, Any]]) -> None:
    assert [rank["ours by megatron"] for rank in found] == [rank["state"] for rank in found]


def test_a_checkpoint_that_megatron_has_gathered_is_loaded(found: list[dict[str, Any]]) -> None:
    assert [rank["megatron's by us"] for rank in found] == [rank["state"] for rank in found]


def test_a_save_takes_no_more_host_memory_than_the_rank_writes(found: list[dict[str, Any]]) -> None:
    """And of the optimizer it writes what it owns, if no tensor-parallel rank has the same."""
    for rank in found:
        assert rank["written of the optimizer"] <= rank["owned"]
        assert rank["owned"] < 0.55 * rank["whole"], "dense parameters are shared by two ranks or more, experts by two"
        assert rank["allocated"] < 1.05 * rank["written"]


def _look(model: Path, folder: Path, axes: dict[str, int]) -> dict[str, Any]:
    actor = _actor(model, axes)
    train(actor, 2)
    ours, theirs = folder / "ours", folder / "theirs"
    for path in (ours, theirs):
        path.mkdir(exist_ok=True)
    dist.barrier()
    found = {"state": _state(actor), "allocated": _allocated(lambda: actor.save(ours))}
    _by_megatron(actor, theirs, save=True)
    dist.barrier()
    written = ours / "iter_0000000"
    found |= _sizes(actor, written)
    if dist.get_rank() == 0:
        found |= {"ours": _content(written), "megatron's": _content(theirs)}
    dist.barrier()
    again = _actor(model, axes)
    _by_megatron(again, written, save=False)
    found["ours by megatron"] = _state(again)
    again = _actor(model, axes)
    again.load(theirs)
    found["megatron's by us"] = _state(again)
    return found


def _actor(model: Path, axes: dict[str, int]) -> Any:
    return make_actor(model, optimizer_section(), dtype="bfloat16", **axes)


def _by_megatron(actor: Any, folder: Path, save: bool) -> None:
    """The optimizer's part as Megatron itself writes and reads it."""
    gathers_of(actor).finish()
    content = ModelCheckpoint(actor.shape, actor.layout, actor.models, actor.optimizer)
    with megatron_device(), torch.no_grad():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": group,
        }
        state = content._models(group)
        models = {"model": state["model0"]}
        state["optimizer"] = actor.optimizer.sharded_state_dict(models, is_loading=not save, metadata=metadata)
        if save:
            dist_checkpointing.save(state, str(folder), content_metadata={})
            return
        loaded = dist_checkpointing.load(state, str(folder))
        actor.models[0].load_state_dict(loaded["model0"])
        actor.optimizer.load_state_dict(loaded["optimizer"])


def _state(actor: Any) -> list[tuple[float, str]]:
    """Step and digest of each of the rank's tensors, in their order."""
    gathers_of(actor).finish()
    steps = [group["step"] for part in optimizer_parts(actor.optimizer) for group in part.optimizer.param_groups]
    tensors = [part.tensors[name] for part in owned_state(actor.optimizer) for name in sorted(part.tensors)]
    tensors += [param for model in actor.models for param in model.parameters()]
    return [(max(steps), _digest(tensor)) for tensor in tensors]


def _content(folder: Path) -> dict[str, Any]:
    """Digests of whole tensors by key, and what the optimizers of all ranks have in common."""
    common = torch.load(folder / "common.pt", weights_only=False)["optimizer"]
    reader = checkpoint.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    whole = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.load(whole, storage_reader=reader, no_dist=True)
    return {key: (tuple(tensor.shape), _digest(tensor)) for key, tensor in whole.items()} | {"common": str(common)}


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().float().clone().numpy().tobytes()).hexdigest()


def _sizes(actor: Any, folder: Path) -> dict[str, int]:
    """Bytes: what the rank keeps of the optimizer, how much there is of it, what it has written."""
    mine = f"__{dist.get_rank()}_"
    owned = sum(tensor.nbytes for part in owned_state(actor.optimizer) for tensor in part.tensors.values())
    chunks = [
        4 * chunk.box.volume
        for tensor in read_index(folder).tensors.values()
        for chunk in tensor.chunks
        if tensor.key.startswith("optimizer.") and chunk.file.startswith(mine)
    ]
    return {
        "owned": owned,
        "whole": 12 * sum(param.numel() for model in actor.models for param in model.parameters()),
        "written of the optimizer": sum(chunks),
        "written": sum(path.stat().st_size for path in folder.glob(f"{mine}*.distcp")),
    }


def _allocated(call: Any) -> int:
    """The most bytes of tensors that the call had at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
