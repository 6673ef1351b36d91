"""Programs of ranks that save sharded models, and load them on other meshes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.checkpoint.export import plan_export, write_export
from rlhpc.core import storage
from tests.backends.fsdp.sharded_cases import build, policy_step
from tests.helpers.checkpoints import failing_fsync, message_of
from tests.helpers.equality import Case, actor

TOKENS = list(range(2, 34))
FSYNC_FAILS = ("weights.json", ".metadata.tmp", "__1_0.distcp")


class Trained:
    """A model on this rank, its AdamW and its checkpoints."""

    def __init__(self, folder: Path, sizes: dict[str, int], *, load: bool = True, **options: Any) -> None:
        from rlhpc.backends.fsdp.checkpoint import ShardedCheckpoint

        self.model, self.weights, _ = build(folder, sizes, load=load, **options)
        matrices = [p for p in self.model.module.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.module.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.checkpoint = ShardedCheckpoint(self.model, self.weights)

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            policy_step(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, folder: Path, *, asynchronous: bool = False) -> Any:
        return self.checkpoint.save(folder, self.optimizer, asynchronous=asynchronous)

    def load(self, folder: Path) -> Trained:
        self.checkpoint.load(folder, self.optimizer)
        return self

    def whole(self) -> dict[str, Any]:
        """Weights by HuggingFace's names, and the optimizer's state by parameters, whole."""
        found = {name: tensor.clone() for name, tensor in self.weights.full_tensors()}
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{key} of {names[parameter]}"] = whole.clone()
        return found

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.whole().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def logits(self) -> Any:
        with torch.no_grad():
            return self.model(torch.tensor([TOKENS]))


def save_all(folders: dict[str, Path], target: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Saves and exports each model after two updates; what it is then, and after one more."""
    found = {}
    for name, folder in folders.items():
        trained = Trained(folder, sizes, **_options(name)).train(2)
        trained.save(make_folder(target / name))
        logits, before = trained.logits(), trained.whole()
        _export(trained, folder, make_folder(target / f"{name}-hf"))
        found[name] = (before, trained.train(1).digest(), logits)
    return found


def load_all(folders: dict[str, Path], saved: Path, sizes: dict[str, int], again: Path) -> dict[str, Any]:
    """Loads each model, and saves it ``again``; what it is then, and after one more update."""
    found = {}
    for name, folder in folders.items():
        trained = Trained(folder, sizes, load=False, **_options(name)).load(saved / name)
        before = trained.whole()
        trained.save(make_folder(again / name))
        found[name] = (before, trained.train(1).digest())
    return found


def _options(name: str) -> dict[str, Any]:
    return {"compute_dtype": torch.bfloat16} if name == "gemma2" else {}


def _export(trained: Trained, folder: Path, target: Path) -> None:
    dtype = trained.model.options.compute_dtype
    plan = plan_export([w.tensor for w in trained.weights.weights], folder, str(dtype).removeprefix("torch."))
    write_export(plan, None if dist.get_rank() else target, trained.weights.full_tensors(dtype), 1)


def load_otherwise(folders: dict[str, Path], saved: Path, megatron: Path) -> dict[str, Any]:
    """Loads into a critic, a critic's into a critic, and into a frozen model; and what is refused."""
    from rlhpc.backends.fsdp.checkpoint import ShardedCheckpoint

    def load(folder: Path, saved: Path, *, without_head: bool = False, **options: Any) -> dict[str, Any]:
        model, weights, _ = build(folder, {"dp_shard": 2}, load=False, **options)
        ShardedCheckpoint(model, weights).load(saved, without_head=without_head)
        return {name: tensor.clone() for name, tensor in weights.full_tensors()}

    half = {"shard_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
    llama, moe = folders["llama"], folders["qwen3moe"]
    critic = Trained(llama, {"dp_shard": 2}, head="value")
    critic.model.head.weight.data.fill_(0.25)
    critic.save(make_folder(saved / "critic"))
    return {
        "critic": load(llama, saved / "llama", without_head=True, head="value"),
        "critic again": load(llama, saved / "critic", without_head=True, head="value"),
        "tied critic": load(folders["qwen3_tied"], saved / "qwen3_tied", without_head=True, head="value"),
        "frozen": load(moe, saved / "qwen3moe", **half),
        "no head": message_of(lambda: load(llama, saved / "llama", head="value")),
        "other model": message_of(lambda: load(moe, saved / "llama")),
        "megatron's": message_of(lambda: load(llama, megatron)),
        "no optimizer": message_of(lambda: Trained(llama, {"dp_shard": 2}).load(_without_optimizer(llama, saved))),
    }


def _without_optimizer(folder: Path, saved: Path) -> Path:
    target = make_folder(saved / "frozen")
    trained = Trained(folder, {"dp_shard": 2})
    trained.checkpoint.save(target)
    return target


def save_beside_training(folder: Path, target: Path) -> dict[str, Any]:
    """Two updates while the writing thread is held up; two models in the background at once."""
    from rlhpc.backends.fsdp.checkpoint_files import BlockWriter

    write, free = BlockWriter.write_data, threading.Event()

    def held(self: Any, *args: Any) -> Any:
        assert free.wait(600)
        return write(self, *args)

    first, second = (Trained(folder, {"dp_shard": 2}).train(steps) for steps in (1, 2))
    expected = [first.digest(), second.digest()]
    BlockWriter.write_data = held
    shares = [
        trained.save(make_folder(target / name), asynchronous=True)
        for trained, name in ((first, "first"), (second, "second"))
    ]
    straight = [first.train(2).digest(), second.train(1).digest()]
    early = [share.done() for share in shares]
    free.set()
    for share in reversed(shares):
        share.finish()
    BlockWriter.write_data = write
    late = [share.done() for share in shares]
    loaded = [Trained(folder, {"dp_shard": 2}, load=False).load(target / name) for name in ("first", "second")]
    found = [trained.digest() for trained in loaded]
    resumed = [loaded[0].train(2).digest(), loaded[1].train(1).digest()]
    return {
        "saved": found == expected,
        "resumed": resumed == straight,
        "done": (early, late),
        "others": not set(straight) & set(expected),
    }


def fail_to_write(folder: Path, target: Path) -> dict[str, Any]:
    """A full disk, and files whose fsync fails once or for good, at once and in the background."""
    trained = Trained(folder, {"dp_shard": 2}).train(1)
    found: dict[str, Any] = {}
    for way in (False, True):
        for name in ("__1_0.distcp", ".metadata.tmp"):
            full = make_folder(target / f"full {name} {way}")
            _on_first_rank(lambda full=full, name=name: (full / name).symlink_to("/dev/full"))
            found[f"full {name} {way}"] = message_of(lambda full=full, way=way: _save(trained, full, way))
        with failing_fsync(make_folder(target / f"failed {way}"), FSYNC_FAILS, times=1) as failed:
            _save(trained, make_folder(target / f"again {way}"), way)
            found[f"again {way}"] = failed()
        loaded = Trained(folder, {"dp_shard": 2}, load=False).load(target / f"again {way}")
        found[f"whole {way}"] = loaded.digest() == trained.digest()
    storage.use(storage.Patience(0.2))
    for name in FSYNC_FAILS:
        place = make_folder(target / f"lost {name}")
        with failing_fsync(make_folder(target / f"count {name}"), [name], times=10**6):
            found[f"lost {name}"] = message_of(lambda place=place, name=name: _save(trained, place, name[0] == "_"))
    return found


def _save(trained: Trained, folder: Path, asynchronous: bool) -> None:
    share = trained.save(folder, asynchronous=asynchronous)
    if share is not None:
        share.finish()


def load_poisoned(folder: Path, poisoned: dict[str, Path]) -> dict[str, str]:
    """The error of each folder."""
    trained = Trained(folder, {"dp_shard": 2})
    return {name: message_of(lambda place=place: trained.load(place)) for name, place in poisoned.items()}


def load_by_megatron(model: Path, saved: Path) -> str:
    backend: Any = actor(model, Case("llama"), None)
    return message_of(lambda: backend.load_pretrained(saved))


def make_folder(folder: Path) -> Path:
    """On the first rank; the others wait."""
    _on_first_rank(lambda: folder.mkdir(parents=True, exist_ok=True))
    return folder


def _on_first_rank(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()
