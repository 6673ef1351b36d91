"""Memory that is away between phases comes back without a changed bit, alone and with every other lever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.parts import bytes_by_storage
from tests.helpers.tiny_models import make_model
from tests.helpers.training import batches_of, digest, make_actor, optimizer_section, save, train

pytestmark = pytest.mark.ranks

EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that is looked at, from two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("offload")
    return run_ranks(_look, 2, make_model(folder / "model", "qwen3moe"), folder)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_five_steps_are_bit_equal_and_so_are_those_after_a_resume(found: dict[str, Any], dtype: str) -> None:
    """Away as in a run: gradients and optimizer before weights are synced, the weights after it."""
    runs = found["runs"][dtype]
    for name in ("all", "half", "gradients"):
        assert runs[name] == runs["kept"], name
    assert runs["resumed"] == runs["kept"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_away_holds_no_memory(found: dict[str, Any], dtype: str) -> None:
    """Bytes on the device while away: of the weights, gradients, master weights and moments, all that there are."""
    assert found["held"][dtype]["kept"] == found["total"][dtype]
    assert found["held"][dtype]["all"] == 0


def test_weights_that_are_being_synced_stay(found: dict[str, Any]) -> None:
    weights, others = found["weights while synced"], found["others while synced"]
    assert weights > 0
    assert others == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fraction_is_of_all_bytes_that_may_go(found: dict[str, Any], dtype: str) -> None:
    share = 1 - found["held"][dtype]["half"] / found["total"][dtype]
    assert 0.5 <= share < 0.9


def test_a_frozen_model_is_away_unless_it_computes(found: dict[str, Any]) -> None:
    reference = found["reference"]
    assert reference["at rest"] == 0
    assert reference["computing"] > 0
    assert reference["afterwards"] == 0
    assert reference["log-probs are equal"]
    assert reference["a copy of the actor is equal"]


def _look(model: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": {}, "held": {}, "total": {}}
    for dtype in DTYPES:
        runs = found["runs"][dtype] = {}
        held = found["held"][dtype] = {}
        for name, keys in {
            "kept": {},
            "all": EVERYTHING,
            "half": {**EVERYTHING, "fraction": 0.5},
            "gradients": {"gradients": True},
        }.items():
            actor = _actor(model, dtype, keys)
            runs[name] = _steps(actor, 3)
            actor.offload()
            held[name] = sum(_held(actor, kind) for kind in ("parameters", "gradients", "optimizer"))
            if name == "all":
                save(actor, folder / dtype)
            runs[name] += [*_steps(actor, 2), digest(actor)]
            if name == "kept":
                found["total"][dtype] = held["kept"]
        actor = _actor(model, dtype, EVERYTHING)
        actor.offload()
        actor.load(folder / dtype)
        runs["resumed"] = [*runs["kept"][:3], *_steps(actor, 2), digest(actor)]
    actor.offload(keep_parameters=True)
    found["weights while synced"] = _held(actor, "parameters")
    found["others while synced"] = _held(actor, "gradients") + _held(actor, "optimizer")
    found["reference"] = _reference(model, actor)
    return found


def _actor(model: Path, dtype: str, keys: dict[str, Any], trained: bool = True) -> Any:
    from rlhpc.config.training import MemorySection

    section = optimizer_section() if trained else None
    return make_actor(model, section, MemorySection(offload=keys), dtype)


def _steps(actor: Any, count: int) -> list[Any]:
    """Updates with what comes between them in a run: weights read, everything away, log-probs."""
    found = []
    for _ in range(count):
        actor.offload(keep_parameters=True)
        weights = digest(actor)
        actor.offload()
        log_probs = [float(stats.log_probs.sum()) for stats in actor.log_probs(batches_of(actor), 1.0)]
        found.append((weights, log_probs, train(actor)))
    return found


def _held(actor: Any, kind: str) -> int:
    """Bytes of the storages behind the tensors of a kind; those of a former kind do not count again."""
    from rlhpc.backends.megatron.optimizer import device_tensors

    def storages(kind: str) -> dict[int, int]:
        tensors = device_tensors(actor.models, actor.optimizer, kind)
        return bytes_by_storage(tensors)

    counted = storages("parameters") if kind == "optimizer" else {}
    return sum(size for key, size in storages(kind).items() if key not in counted)


def _reference(model: Path, actor: Any) -> dict[str, Any]:
    import torch

    plain = _actor(model, "bfloat16", {}, trained=False)
    expected = plain.log_probs(batches_of(plain), 1.0)
    frozen = _actor(model, "bfloat16", {"parameters": True}, trained=False)
    frozen.offload()
    found: dict[str, Any] = {"at rest": _held(frozen, "parameters")}
    stats = frozen.log_probs(batches_of(frozen), 1.0)
    found["computing"] = _held(frozen, "parameters")
    found["log-probs are equal"] = all(
        torch.equal(a.log_probs, b.log_probs) for a, b in zip(stats, expected, strict=True)
    )
    frozen.offload()
    found["afterwards"] = _held(frozen, "parameters")
    actor.offload()
    frozen.copy_weights(actor)
    frozen.offload()
    found["a copy of the actor is equal"] = digest(frozen) == digest(actor)
    return found


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
    expected = [*_log_probs_and_steps(plain, 2), digest(plain)]

    memory, section = MemorySection(**LEVERS), optimizer_section(optimizer_offload_fraction=0.5)
    actor = make_actor(model, section, memory, **AXES)
    found = _log_probs_and_steps(actor, 1)
    share = save(actor, saved, asynchronous=True)
    found += [*_log_probs_and_steps(actor, 1), digest(actor)]
    share.finish()

    again = make_actor(model, section, memory, **AXES)
    again.load(saved)
    return expected, found, [*_log_probs_and_steps(again, 1), digest(again)]


def _log_probs_and_steps(actor: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        actor.offload()
        log_probs = [float(stats.log_probs.sum()) for stats in actor.log_probs(batches_of(actor), 1.0)]
        found.append((log_probs, train(actor)))
    return found
