"""Programs of ranks that update sharded models by given gradients, and a whole model beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import distribute_tensor

from rlhpc.config.training import OptimizerSection
from rlhpc.core.errors import UserError
from tests.backends.fsdp.sharded_cases import build, policy_step

RATE, DECAY, UPDATES = 0.1, 0.1, 3
JOINED = ("qkv_proj", "query_key_value", "c_attn")
HEADS, HEAD = 4, 32  # of the tiny models
JOINED_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 128, "n_head": 4, "n_positions": 64, "multi_query": False},
    "persimmon": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4},
    "phi3": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def make_joined(folder: Path, kind: str, layers: int = 2) -> Path:
    """Config of a tiny model of a family that joins queries, keys and values."""
    from transformers import AutoConfig

    common = {"vocab_size": 67, "num_hidden_layers": layers, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    AutoConfig.for_model(kind, **JOINED_FAMILIES[kind], **common).save_pretrained(folder)
    return folder


def section(name: str, **keys: Any) -> Any:
    return OptimizerSection(name=name, weight_decay=DECAY, **keys)


class Trained:
    """A sharded model with given weights, and its optimizer."""

    def __init__(self, folder: Path, sizes: dict[str, int], optimizer: Any) -> None:
        from rlhpc.backends.fsdp.optimizers import build_optimizer

        self.model, self.weights, _ = build(folder, sizes, load=False, attention="eager")
        self.parameters = dict(self.model.module.named_parameters())
        for number, (name, parameter) in enumerate(self.parameters.items()):
            parameter.data.copy_(self._sharded(name, _normal(parameter.shape, number)))
        self.optimizer = build_optimizer(optimizer, self.model, self.weights)

    def update(self, number: int) -> None:
        from rlhpc.backends.fsdp.optimizers import set_rate

        for name, parameter in self.parameters.items():
            parameter.grad = self._sharded(name, gradient(name, parameter.shape, number))
        set_rate(self.optimizer, RATE, DECAY)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Any]:
        return {name: parameter.detach().full_tensor().clone() for name, parameter in self.parameters.items()}

    def _sharded(self, name: str, whole: Any) -> Any:
        parameter = self.parameters[name]
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def _normal(shape: Any, seed: int) -> Any:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) / 8


def gradient(name: str, shape: Any, number: int) -> Any:
    """Gradient of an update: noise, and a part that all updates share."""
    return _normal(shape, len(name)) / 100 + _normal(shape, 1000 * number + len(name)) / 100


def distances(
    folders: dict[str, Path], sizes: dict[str, int], pairs: list[tuple[str, str]]
) -> dict[tuple[str, str], dict[str, float]] | None:
    """Largest difference of each parameter from the whole model's, by model and optimizer, on rank 0."""
    found = {}
    for kind, name in pairs:
        trained = Trained(folders[kind], sizes, section(name))
        before, whole = trained.whole(), trained.whole()
        for number in range(UPDATES):
            trained.update(number)
        after = trained.whole()
        if dist.get_rank() == 0:
            plain = _PLAIN[name](kind, whole)
            for number in range(UPDATES):
                plain({key: gradient(key, tensor.shape, number) for key, tensor in whole.items()})
            assert all((after[key] - tensor).abs().max() > RATE / 2 for key, tensor in before.items()), "no update"
            found[kind, name] = {key: float((after[key] - tensor).abs().max()) for key, tensor in whole.items()}
    return found or None


def trained_weights(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Weights after updates of Muon by gradients of losses. AdamW's large epsilon damps what it makes of rounding: of a
    gradient's sign, for one near 0."""
    from rlhpc.backends.fsdp.optimizers import build_optimizer, set_rate

    model, weights, _ = build(folder, sizes)
    optimizer = build_optimizer(section("muon", epsilon=1e-2), model, weights)
    for _ in range(UPDATES):
        policy_step(model)
        set_rate(optimizer, RATE, DECAY)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in weights.full_tensors()}


def resume_facts(folder: Path, sizes: dict[str, int], optimizer: Any, target: Path, by: str) -> dict[str, Any]:
    """Parameters after the update that follows a checkpoint, and those that differ where it has been loaded. ``by``:
    a key of CHECKPOINTS."""
    save, _ = CHECKPOINTS[by]
    first = Trained(folder, sizes, optimizer)
    for number in range(2):
        first.update(number)
    save(first, target)
    first.update(2)
    whole, again = first.whole(), resumed(folder, sizes, optimizer, target, by)
    return {"whole": whole, "differ": [name for name, tensor in whole.items() if not torch.equal(tensor, again[name])]}


def resumed(folder: Path, sizes: dict[str, int], optimizer: Any, target: Path, by: str) -> dict[str, Any]:
    """Parameters after an update that follows the loading of a checkpoint."""
    trained = Trained(folder, sizes, optimizer)
    trained.update(7)  # what is not loaded shows
    CHECKPOINTS[by][1](trained, target)
    trained.update(2)
    return trained.whole()


def error_of_loading(folder: Path, sizes: dict[str, int], optimizer: Any, target: Path) -> str:
    try:
        resumed(folder, sizes, optimizer, target, "rlhpc")
    except UserError as error:
        return str(error)
    return ""


def _checkpoint(trained: Trained) -> Any:
    from rlhpc.backends.fsdp.checkpoint import ShardedCheckpoint

    return ShardedCheckpoint(trained.model, trained.weights)


def _save_by_torch(trained: Trained, target: Path) -> None:
    dcp.save(_state(trained), checkpoint_id=target)


def _load_by_torch(trained: Trained, target: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    state = _state(trained)
    dcp.load(state, checkpoint_id=target)
    set_optimizer_state_dict(trained.model.module, trained.optimizer, optim_state_dict=state["optimizer"])


def _state(trained: Trained) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer = get_optimizer_state_dict(trained.model.module, trained.optimizer)
    return {"model": dict(trained.parameters), "optimizer": optimizer}


CHECKPOINTS: dict[str, tuple[Callable[[Trained, Path], Any], Callable[[Trained, Path], Any]]] = {
    "rlhpc": (
        lambda t, folder: _checkpoint(t).save(folder, t.optimizer),
        lambda t, folder: _checkpoint(t).load(folder, t.optimizer),
    ),
    "torch": (_save_by_torch, _load_by_torch),
}


def state_facts(folder: Path, sizes: dict[str, int]) -> dict[str, int]:
    """Elements of parameters, of matrices among them, and of new optimizers' state that this rank holds."""
    from rlhpc.backends.fsdp.optimizers import state_tensors

    adamw, muon = (Trained(folder, sizes, section(name)) for name in ("adamw", "muon"))
    return {
        "parameters": sum(parameter.to_local().numel() for parameter in adamw.parameters.values()),
        "matrices": sum(p.to_local().numel() for p in set(muon.optimizer.matrices.values())),
        "adamw": sum(tensor.numel() for tensor in state_tensors(adamw.optimizer) if tensor.dim()),
        "muon": sum(tensor.numel() for tensor in state_tensors(muon.optimizer)),
    }


def errors_of_updates(folder: Path, sizes: dict[str, int], sections: list[Any]) -> list[str]:
    """The error of each optimizer or of its first update, where torchao is not installed."""
    sys.modules["torchao.optim"] = None  # as if it were not
    errors = []
    for optimizer in sections:
        try:
            Trained(folder, sizes, optimizer).update(0)
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def unsharded(params: Any) -> Any:
    """An optimizer with plain tensors of its shards' shapes, which a checkpoint would take for whole ones."""

    class Mean(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                self.state[parameter] = {"mean": torch.zeros_like(parameter.to_local())}

    return Mean(params)


def joined_facts(folders: dict[str, Path]) -> dict[str, dict[str, bool]]:
    """What models of one layer compute without parts of the joined weight of their attention."""
    return {kind: _joined(folder) for kind, folder in folders.items()}


def _joined(folder: Path) -> dict[str, bool]:
    from rlhpc.backends.fsdp.matrices import Matrix

    trained = Trained(folder, {}, section("muon"))
    (name,) = (name for name in trained.parameters if any(word in name for word in JOINED) and "bias" not in name)
    weight = trained.parameters[name].to_local()
    for other, parameter in trained.parameters.items():
        if other.endswith("bias"):
            parameter.data.zero_()
    whole = weight.clone()
    matrices: list[Matrix] = [matrix for matrix in trained.optimizer.matrices if matrix.parameter == name]
    one, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 6, 7, 8]])

    @torch.no_grad()
    def last(tokens: Any, *zeroed: int) -> Any:
        weight.copy_(whole)
        for number in zeroed:
            for rows in matrices[number].rows:
                weight[rows.start : rows.stop, matrices[number].columns] = 0
        return trained.model(tokens)[0, -1]

    def same(left: Any, right: Any) -> bool:
        return torch.allclose(left, right, atol=1e-5, rtol=0)

    return {
        "three": len(matrices) == 3,
        "all tokens alike without queries": same(last(one, 0), last(one, 1)) and not same(last(one), last(one, 0)),
        "no other token without values": same(last(one, 2), last(other, 2)) and not same(last(one), last(other)),
        "queries are not values": not same(last(one, 0), last(one, 2)),
    }


def plain_adamw(kind: str, weights: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """torch's AdamW on whole weights: a step for given gradients."""
    vectors = [tensor for name, tensor in weights.items() if _is_vector(name, tensor)]
    others = [tensor for name, tensor in weights.items() if not _is_vector(name, tensor)]
    groups = [{"params": others, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)

    def step(gradients: dict[str, Any]) -> None:
        for name, tensor in weights.items():
            tensor.grad = gradients[name]
        optimizer.step()

    return step


def _is_vector(name: str, tensor: Any) -> bool:
    return tensor.dim() == 1 or name.endswith("bias")


def plain_muon(kind: str, weights: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Muon on whole weights by singular value decompositions in float64, AdamW on the others."""
    others = plain_adamw(kind, {name: tensor for name, tensor in weights.items() if _is_adamws(name, tensor)})
    means = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def step(gradients: dict[str, Any]) -> None:
        others(gradients)
        for name, weight in weights.items():
            if _is_adamws(name, weight):
                continue
            means[name] = 0.95 * means[name] + gradients[name]
            direction = gradients[name] + 0.95 * means[name]
            weight *= 1 - RATE * DECAY
            for part, update in zip(_parts(kind, name, weight), _parts(kind, name, direction), strict=True):
                matrix = update.reshape(-1, update.shape[-1]).double()
                left, values, right = torch.linalg.svd(matrix, full_matrices=False)
                moved = (left * _five_steps(values)) @ right
                part -= RATE * 0.2 * max(matrix.shape) ** 0.5 * moved.float().view(part.shape)

    return step


_PLAIN = {"adamw": plain_adamw, "muon": plain_muon}


def _five_steps(values: Any) -> Any:
    """Singular values after five steps of Newton-Schulz, which begin at a Frobenius norm of 1."""
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def _is_adamws(name: str, tensor: Any) -> bool:
    return _is_vector(name, tensor) or any(word in name for word in ("embed", "lm_head", "router", "gate.weight"))


def _parts(kind: str, name: str, tensor: Any) -> Iterator[Any]:
    """Views of the matrices in a parameter, written down for each of the tiny models."""
    if "experts.gate_up_proj" in name:
        for expert in tensor:
            yield from (expert[:, ::2], expert[:, 1::2]) if kind == "gpt_oss" else expert.chunk(2)
    elif "experts" in name:
        yield from tensor
    elif "gate_up_proj" in name:
        yield from tensor.chunk(2)
    elif "qkv_proj" in name:
        yield from tensor.split([HEADS * HEAD, HEADS // 2 * HEAD, HEADS // 2 * HEAD])
    elif "query_key_value" in name:
        yield from tensor.view(HEADS, 3, HEAD, -1).unbind(1)
    else:
        yield tensor
