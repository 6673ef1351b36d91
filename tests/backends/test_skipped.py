"""An update whose gradient is not finite, or larger than allowed, changes nothing: on every axis, of dense weights and
experts, actor and critic, float32 and bfloat16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.api import LossSums, TokenValues
from rlhpc.backends.megatron.experts import GroupedExperts
from rlhpc.backends.megatron.optimizer import inner_optimizers
from rlhpc.config.training import MoeSection
from tests.helpers.distributed import run_ranks
from tests.helpers.parts import gathers_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import TOKENS, batches_of, make_actor, negative_log_likelihood, optimizer_section

pytestmark = pytest.mark.ranks

# Model, axes and dtype. The loss is NaN in the batch of one sequence, which one data-parallel rank has; of the model
# with experts it is the gradient of one rank's experts alone.
CASES: tuple[tuple[str, dict[str, int], str], ...] = (
    ("qwen3", {}, "float32"),
    ("qwen3", {"tp": 2}, "bfloat16"),
    ("dsv3", {"ep": 2}, "bfloat16"),
    ("critic", {"pp": 2}, "float32"),
)
RATE = 1e-3


def test_a_skipped_update_leaves_no_trace(tmp_path: Path) -> None:
    """Weights, moments, master weights, step count and routers' biases stay; the update after it is the one that a
    model makes that has never seen the bad batch."""
    for kind in ("qwen3", "dsv3"):
        make_model(tmp_path / kind, kind)
    for rank in run_ranks(_try_all, 2, tmp_path):
        assert len(rank) == len(CASES)
        for case, found in zip(CASES, rank, strict=True):
            assert not math.isfinite(found["norm"]), case
            assert found["applied"] == [True, False, True], case
            assert found["changed by the bad one"] == [], case
            assert found["changed by the large one"] == [], case
            assert found["changed by a good one"], case
            assert found["unlike a run without it"] == [], case


def test_weights_that_are_not_finite_are_seen_on_every_rank(tmp_path: Path) -> None:
    """A NaN and an infinity that one rank alone has."""
    folder = make_model(tmp_path / "model", "qwen3")
    assert run_ranks(_seen, 2, folder) == [[True, False, False, True]] * 2


def _try_all(folder: Path) -> list[dict[str, Any]]:
    make_actor(folder / "qwen3")  # whose groups are in force beside those of each case
    return [_try(folder, *case) for case in CASES]


def _try(folder: Path, kind: str, axes: dict[str, int], dtype: str) -> dict[str, Any]:
    model = _make(folder, kind, axes, dtype)
    first = _update(model)
    before = _state(model)
    bad = _update_of_experts(model) if kind == "dsv3" else _update(model, bad=True)
    after = _state(model)
    large = _update(model, skip_above=-1.0)  # the value head is zero, and so is its gradient
    assert not large.applied
    after_large = _state(model)
    following = _update(model, skip_above=1e12)
    other = _make(folder, kind, axes, dtype)
    for _ in range(2):
        _update(other)
    return {
        "norm": bad.grad_norm,
        "applied": [first.applied, bad.applied, following.applied],
        "changed by the bad one": _differing(before, after),
        "changed by the large one": _differing(before, after_large),
        "changed by a good one": _differing(before, _state(model)),
        "unlike a run without it": _differing(_state(other), _state(model)),
    }


def _make(folder: Path, kind: str, axes: dict[str, int], dtype: str) -> Any:
    folder, head = (folder / "qwen3", "value") if kind == "critic" else (folder / kind, "vocabulary")
    experts = MoeSection(bias_update_rate=0.01)
    return make_actor(folder, optimizer_section(), None, dtype, experts, head=head, own_groups=True, **axes)


def _update(model: Any, bad: bool = False, skip_above: float = math.inf) -> Any:
    """Of the batches that all cases have; a bad one's loss is NaN where the fourth sequence is."""

    def loss(stats: Any, batch: Any) -> Any:
        if isinstance(stats, TokenValues):
            total = (stats.values.square() * batch.loss_weight).sum()
            sums = LossSums(total, {"loss": total.detach()})
        else:
            sums = negative_log_likelihood(stats, batch)
        return LossSums(sums.total * math.nan, sums.metrics) if bad and 3 in batch.sample_ids else sums

    return model.train(batches_of(model), loss, TOKENS, 1.0, RATE, skip_above)


def _update_of_experts(model: Any) -> Any:
    """The gradient of the last rank's experts is infinite in one element, that of all else is what it should be."""
    experts = [module for part in model.models for module in part.modules() if isinstance(module, GroupedExperts)]
    weight = experts[-1].w2

    def spoil(_: Any) -> None:
        weight.main_grad.view(-1)[0] = math.inf

    hook = weight.register_hook(spoil) if dist.get_rank() else None
    stats = _update(model)
    if hook is not None:
        hook.remove()
    return stats


def _state(model: Any) -> dict[str, Any]:
    """A copy of all that an update changes on this rank: weights, buffers, what routers count, the optimizer."""
    found: dict[str, Any] = {}
    gathers_of(model).finish()
    for part in model.models:
        found.update(part.named_parameters())
        found.update(part.named_buffers())
    for number, router in enumerate(model._routers):
        found[f"router {number}"] = router.counts
    for number, inner in enumerate(inner_optimizers(model.optimizer)):
        for place, group in enumerate(inner.param_groups):
            key = f"optimizer {number} group {place}"
            found.update({f"{key} {name}": value for name, value in group.items() if name != "params"})
            for index, param in enumerate(group["params"]):
                state = {"param": param, **inner.state[param]}
                found.update({f"{key} {index} {name}": value for name, value in state.items()})
    return {name: value.detach().clone() if torch.is_tensor(value) else value for name, value in found.items()}


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """What is not the same, bit by bit."""
    assert first.keys() == second.keys()
    same = {
        name: torch.equal(value, second[name]) if torch.is_tensor(value) else value == second[name]
        for name, value in first.items()
    }
    return [name for name, equal in same.items() if not equal]


def _seen(folder: Path) -> list[bool]:
    model = make_actor(folder, optimizer_section(), dtype="bfloat16", tp=2)
    weight = next(iter(model.models[0].parameters()))
    kept, found = weight.detach().clone(), [model.has_finite_weights()]
    for value in (math.nan, -math.inf):
        if dist.get_rank():
            with torch.no_grad():
                weight.view(-1)[5] = value
        found.append(model.has_finite_weights())
    with torch.no_grad():
        weight.copy_(kept)
    return [*found, model.has_finite_weights()]
