"""Programs of ranks that use a back end through ``rlhpc.api.TrainBackend`` alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhpc.api import LossSums
from rlhpc.config.training import MemorySection
from tests.backends.fsdp.backend_cases import Case, make_backend
from tests.helpers.training import (
    TOKENS,
    batches_of,
    digest,
    make_actor,
    negative_log_likelihood,
    optimizer_section,
    update,
)

OFFLOADED = {"parameters": True, "gradients": True, "optimizer": True}


def make(name: str, folder: Path, optimizer: Any = None, *, head: str = "vocabulary", offload: Any = None) -> Any:
    """A back end with the weights of ``folder``."""
    offload = offload or {}
    if name == "fsdp":
        return make_backend(folder, Case("", memory={"offload": offload}), optimizer, head=head)
    return make_actor(folder, optimizer, MemorySection(offload=offload), head=head)


def facts(name: str, folder: Path, saved: Path) -> dict[str, Any]:
    """What each part of the contract shows on this rank."""
    return {
        **_weights(name, folder),
        **_updates(name, folder),
        **_checkpoints(name, folder, saved),
        **_offload(name, folder),
        "critic": _critic(name, folder),
        "numbers": _numbers(name, folder),
    }


def _weights(name: str, folder: Path) -> dict[str, Any]:
    files, model = load_file(folder / "model.safetensors"), make(name, folder)
    whole = dict(model.full_tensors())
    shards = {shard: model.view(shard).clone() for shard in model.shards()}
    found = {
        "names": sorted(whole) == sorted(files),
        "unequal": [key for key, tensor in whole.items() if not torch.equal(tensor, files[key])],
        "wrong_views": [s for s, view in shards.items() if not torch.equal(view, files[s.tensor.name][s.box.slices])],
        "elements": sum(shard.box.volume for shard in shards),
        "read_seconds": model.read_seconds,
        "architecture": model.shape.architecture,
        "dp": model.layout.dp,
    }
    first = next(iter(whole))
    other = make(name, folder)
    other.take_tensors([(first, whole[first] + 1.0), ("no.such.weight", torch.zeros(1))])
    taken = dict(other.full_tensors())
    found["taken"] = [key for key in whole if not torch.equal(taken[key], whole[key])] == [first]
    other.copy_weights(model)
    found["copied"] = digest(other) == digest(model)
    return found


def _updates(name: str, folder: Path) -> dict[str, Any]:
    model = make(name, folder, optimizer_section())
    batches, before = batches_of(model), digest(model)
    stats = model.log_probs(batches, 0.7)
    found: dict[str, Any] = {
        "outside": max(float((s.log_probs * (1 - b.mask)).abs().max()) for s, b in zip(stats, batches, strict=True)),
        "likely": max(float(s.log_probs.max()) for s in stats) <= 0.0,
        "blank": [tuple(s.log_probs.shape) for s in model.log_probs([batches[0].blank(5)], 1.0)],
    }
    tried = model.differentiate(batches, negative_log_likelihood, TOKENS, 1.0)
    found["differentiated"] = (tried.applied, digest(model) == before)
    above = tried.grad_norm / 2
    skipped = model.train(batches, negative_log_likelihood, TOKENS, 1.0, 1e-3, skip_above=above)
    broken = model.train(batches, _not_finite, TOKENS, 1.0, 1e-3)
    found["skipped"] = (skipped.applied, broken.applied, math.isfinite(broken.grad_norm), digest(model) == before)
    done = update(model)
    found["applied"] = (done.applied, digest(model) != before, done.grad_norm == tried.grad_norm)
    found["equal_sums"] = tried.sums == done.sums
    first = digest(model)
    model.load_pretrained(folder)
    update(model)
    found["reset"] = digest(model) == first
    found["finite"] = model.has_finite_weights()
    if dist.get_rank() == 1:
        model.view(model.shards()[0]).view(-1)[0] = torch.nan
    found["not_finite"] = not model.has_finite_weights()
    model.settle()
    return found


def _not_finite(stats: Any, batch: Any) -> Any:
    sums = negative_log_likelihood(stats, batch)
    return replace(sums, total=sums.total * math.inf)


def _checkpoints(name: str, folder: Path, saved: Path) -> dict[str, Any]:
    model, other = make(name, folder, optimizer_section()), make(name, folder, optimizer_section())
    update(model)
    model.save(_made(saved / "now"))
    written, after = model.save(_made(saved / "background"), asynchronous=True), digest(model)
    update(model)
    written.finish()
    found = {}
    for kind in ("now", "background"):
        other.load(saved / kind)
        found[f"loaded {kind}"] = digest(other) == after
        update(other)
        found[f"resumed {kind}"] = digest(other) == digest(model)
    other.load_pretrained(saved / "now")
    return {**found, "initial weights of a checkpoint": digest(other) == after}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder


def _offload(name: str, folder: Path) -> dict[str, Any]:
    model, plain = make(name, folder, optimizer_section(), offload=OFFLOADED), make(name, folder, optimizer_section())
    update(model)
    update(plain)
    model.offload(keep_parameters=True)
    view = model.view(model.shards()[0])
    kept = view.untyped_storage().nbytes()
    model.offload()
    gone = view.untyped_storage().nbytes()
    update(model)
    update(plain)
    return {"offloaded": (kept > 0, gone), "offload changes nothing": digest(model) == digest(plain)}


def _critic(name: str, folder: Path) -> dict[str, Any]:
    critic = make(name, folder, optimizer_section(), head="value")
    batches = batches_of(critic)
    fresh = max(float(v.values.abs().max()) for v in critic.values(batches))
    weight = torch.linspace(-1.0, 1.0, critic.shape.hidden_size)[None]
    critic.take_tensors([("score.weight", weight)])
    values = [v.values.double().sum().item() for v in critic.values(batches)]
    stats = critic.train(batches, _squares, TOKENS, 1.0, 1e-3)
    return {"fresh": fresh, "values": values, "grad_norm": stats.grad_norm, "sums": stats.sums}


def _squares(values: Any, batch: Any) -> Any:
    total = ((values.values - 0.5) ** 2 * batch.loss_weight).sum()
    return LossSums(total, {"loss": total.detach(), "max/value": values.values.detach().max()})


def _numbers(name: str, folder: Path) -> dict[str, Any]:
    """Loss and gradient norm of three updates, and the weights after them."""
    model = make(name, folder, optimizer_section())
    stats = [update(model) for _ in range(3)]
    weights = {key: tensor.clone() for key, tensor in model.full_tensors()}
    return {"updates": [(s.sums["loss"] / TOKENS, s.grad_norm) for s in stats], "weights": weights}
