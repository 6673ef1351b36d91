"""AdamW shared with the host, an optimizer of the user's, and the types that an update is made in."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.parts import chunks_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section, save, train

pytestmark = pytest.mark.ranks


LION = "docs.examples.my_optimizer:Lion"  # the page's example


def make_nothing(params: Any) -> str:
    return "nothing"


def make_with_megatron_s_masters(params: Any) -> torch.optim.Optimizer:
    """The same AdamW in the place of a user's, which gets master weights for parameters."""
    from rlhpc.backends.megatron.adamw import AdamW

    class Late(AdamW):
        def step(self, closure: None = None) -> None:
            if not self.state:
                self.begin()
            super().step()

    return Late(params, eps=optimizer_section().epsilon)


_made: list[weakref.ref] = []
_alive: list[int] = []


def make_and_look_round(params: Any) -> torch.optim.Optimizer:
    """Counts the optimizers there are when another one is made."""
    _alive.append(sum(made() is not None for made in _made))
    optimizer = make_with_megatron_s_masters(params)
    _made.append(weakref.ref(optimizer))
    return optimizer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that is looked at, from two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("optimizer")
    model = make_model(folder / "model", "qwen3", tie_word_embeddings=True)
    first, second = run_ranks(_look, 2, model, folder)
    assert first["losses"] == second["losses"]
    return first


def test_the_host_s_share_changes_no_bit(found: dict[str, Any]) -> None:
    losses = found["losses"]
    assert losses["host 0.4"] == losses["host 0.0"]
    assert losses["host 1.0"] == losses["host 0.0"]
    shares = found["shares"]
    assert shares["host 0.0"] == 0.0
    assert 0.4 <= shares["host 0.4"] < 1.0
    assert shares["host 1.0"] == 1.0


def test_master_weights_of_our_own_are_megatron_s_to_the_bit(found: dict[str, Any]) -> None:
    """bfloat16 weights, all their float32 copies on the device, a part of them on the host, and all of them."""
    losses = found["half"]
    assert losses["megatron's"][-1][0] < losses["megatron's"][0][0]
    for name in ("host 0.0", "host 0.4", "host 1.0"):
        assert losses[name] == losses["megatron's"], name


def test_master_weights_come_back_from_a_checkpoint(found: dict[str, Any]) -> None:
    """Of Megatron's own into ours on the host, and the other way round."""
    losses = found["half"]
    assert losses["ours from megatron's"] == losses["megatron's"][2:]
    assert losses["megatron's from ours"] == losses["megatron's"][2:]
    assert losses["without master weights"] != losses["megatron's"][2:], "the rounded weights would have done"


def test_a_checkpoint_does_not_know_of_the_host(found: dict[str, Any]) -> None:
    """Saved with a share of 0.4 after two of four updates, loaded with 0.4, with 0 and with 1."""
    for share in ("0.4", "0.0", "1.0"):
        assert found["losses"][f"resumed with {share}"] == found["losses"]["host 0.0"][2:]


def test_an_optimizer_is_gone_before_its_successor_is_made(found: dict[str, Any]) -> None:
    """As at the change from a warm-up to RL, with the former one's state on the host."""
    assert found["alive"] == [0, 0, 0]


def test_weights_decay_and_vectors_do_not(found: dict[str, Any]) -> None:
    assert found["decay"] == {1: {0.0}, 2: {0.1}}


def test_an_optimizer_of_one_s_own_trains_and_resumes(found: dict[str, Any]) -> None:
    """The first update of Lion moves every weight by the rate, for any gradient."""
    lion = found["losses"]["lion"]
    assert lion[0] == found["losses"]["host 0.0"][0]
    assert lion[-1][0] < lion[0][0]
    assert found["lion's first move"] == pytest.approx(1e-3, rel=1e-3)
    assert found["losses"]["lion resumed"] == lion[2:]


def test_what_megatron_cannot_save_is_refused_at_the_first_update(found: dict[str, Any]) -> None:
    refusals = found["refusals"]
    assert refusals["torch.optim:AdamW"] == (
        "actor.optimizer.function: torch.optim:AdamW stores ['exp_avg', 'exp_avg_sq', 'step'] for a parameter, which a "
        "checkpoint cannot contain; store exp_avg and exp_avg_sq of the parameter's shape, and the step in its group"
    )
    assert "returned a str, not a torch.optim.Optimizer; return a torch.optim.Optimizer" in refusals["nothing"]
    assert "does not accept parameter groups and ['momentum']" in refusals["wrong arguments"]


def test_bfloat16_weights_have_float32_masters_moments_and_gradients(found: dict[str, Any]) -> None:
    assert found["types"] == {
        "weights": {torch.bfloat16},
        "gradient buffers": {torch.float32},
        "master weights": {torch.float32},
        "moments": {torch.float32},
    }


def _look(model: Path, folder: Path) -> dict[str, Any]:
    losses: dict[str, Any] = {}
    shares: dict[str, float] = {}
    for share in (0.0, 0.4, 1.0):
        actor = make_actor(model, optimizer_section(optimizer_offload_fraction=share))
        name = f"host {share}"
        losses[name] = train(actor, 2)
        if share == 0.4:
            _save(actor, folder / "adamw")
        losses[name] += train(actor, 2)
        shares[name] = _share_on_cpu(actor)
    for share in (0.4, 0.0, 1.0):
        actor = make_actor(model, optimizer_section(optimizer_offload_fraction=share))
        actor.load(folder / "adamw")
        losses[f"resumed with {share}"] = train(actor, 2)
    found = {"losses": losses, "shares": shares, "decay": _decay(actor), "refusals": _refusals(model)}

    section = optimizer_section(function=LION, weight_decay=0.0)
    actor = make_actor(model, section)
    before = {name: tensor.clone() for name, tensor in actor.full_tensors()}
    losses["lion"] = train(actor, 1)
    moved = torch.cat([(tensor - before[name]).abs().flatten() for name, tensor in actor.full_tensors()])
    found["lion's first move"] = float(moved.median())
    losses["lion"] += train(actor, 1)
    _save(actor, folder / "lion")
    losses["lion"] += train(actor, 2)
    actor = make_actor(model, section)
    actor.load(folder / "lion")
    losses["lion resumed"] = train(actor, 2)

    found["half"] = _half(model, folder)
    found["alive"] = _change_optimizers(model)
    found["types"] = _types(model)
    return found


def _half(model: Path, folder: Path) -> dict[str, Any]:
    """Losses of four updates in bfloat16, and of the last two after a resume."""
    from rlhpc.backends.megatron import adamw

    def make(**keys: Any) -> Any:
        return make_actor(model, optimizer_section(**keys), dtype="bfloat16")

    def four_updates(actor: Any, saved: Path) -> Any:
        losses = train(actor, 2)
        _save(actor, saved)
        return losses + train(actor, 2)

    def resumed(actor: Any, saved: Path) -> Any:
        actor.load(saved)
        return train(actor, 2)

    classic = {"function": "tests.backends.test_optimizer:make_with_megatron_s_masters"}
    theirs, ours = folder / "megatron's", folder / "ours"
    losses = {"megatron's": four_updates(make(**classic), theirs)}
    adamw.STAGED = 128  # so that a parameter goes over in several pieces, the last one shorter
    for share in (0.0, 0.4, 1.0):
        losses[f"host {share}"] = four_updates(make(optimizer_offload_fraction=share), ours.with_suffix(f".{share}"))
    losses["ours from megatron's"] = resumed(make(optimizer_offload_fraction=1.0), theirs)
    losses["megatron's from ours"] = resumed(make(**classic), ours.with_suffix(".1.0"))
    rounded = make(optimizer_offload_fraction=0.4)
    rounded.load(theirs)
    inner = _inner(rounded)
    for param in (param for group in inner.param_groups for param in group["params"]):
        inner.master(param).copy_(param)
    losses["without master weights"] = train(rounded, 2)
    return losses


def _change_optimizers(model: Path) -> list[int]:
    from rlhpc.config.training import MemorySection

    section = optimizer_section(function="tests.backends.test_optimizer:make_and_look_round")
    actor = make_actor(model, section, MemorySection(offload={"optimizer": True}), "bfloat16")
    train(actor, 1)
    for away in (False, True):
        if away:
            actor.offload()
        actor.reset_optimizer()
        train(actor, 1)
    return _alive


def _save(actor: Any, folder: Path) -> None:
    save(actor, folder)


def _inner(actor: Any) -> Any:
    from rlhpc.backends.megatron.optimizer import inner_optimizers

    (inner,) = inner_optimizers(actor.optimizer)
    return inner


def _share_on_cpu(actor: Any) -> float:
    inner = _inner(actor)
    params = [param for group in inner.param_groups for param in group["params"]]
    return sum(param.numel() for param in inner.on_cpu) / sum(param.numel() for param in params)


def _decay(actor: Any) -> dict[int, set[float]]:
    """Weight decay by the number of dimensions of the weight."""
    (part,) = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    decay: dict[int, set[float]] = {}
    for weight, (group, _) in part.model_param_group_index_map.items():
        decay.setdefault(weight.dim(), set()).add(part.optimizer.param_groups[group]["weight_decay"])
    return decay


def _refusals(model: Path) -> dict[str, str]:
    from rlhpc.core.errors import UserError

    refusals = {}
    for name, keys in {
        "torch.optim:AdamW": {"function": "torch.optim:AdamW"},
        "nothing": {"function": "tests.backends.test_optimizer:make_nothing"},
        "wrong arguments": {"function": LION, "arguments": {"momentum": 1}},
    }.items():
        with pytest.raises(UserError) as caught:
            train(make_actor(model, optimizer_section(**keys)))
        refusals[name] = str(caught.value)
    return refusals


def _types(model: Path) -> dict[str, set[torch.dtype]]:
    actor = make_actor(model, optimizer_section(), dtype="bfloat16")
    train(actor, 1)
    params = [param for module in actor.models for param in module.parameters()]
    inner = _inner(actor)
    return {
        "weights": {param.dtype for param in params},
        "gradient buffers": {buffer.grad_data.dtype for chunk in chunks_of(actor) for buffer in chunk.buffers},
        "master weights": {inner.master(param).dtype for group in inner.param_groups for param in group["params"]},
        "moments": {state[name].dtype for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")},
    }
