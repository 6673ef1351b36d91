"""Real Megatron, real vLLM: synced weights make the engine that would have read them from disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhpc.config.schema import ReshardSection
from rlhpc.core.errors import ReshardError
from rlhpc.parallel import offload
from rlhpc.reshard.manager import Job, ReshardManager
from rlhpc.reshard.sides import sync_sides
from rlhpc.sharding.engine_shards import EngineLayout
from tests.helpers import equality, weight_syncs
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case
from tests.helpers.parts import parameters_of
from tests.helpers.weight_syncs import FAMILIES, Pair
from tests.rollout import engines
from tests.rollout.engines import cpu_only

pytestmark = [pytest.mark.ranks, pytest.mark.vllm, cpu_only]

# A few of what `python -m tests.helpers.weight_syncs` tries: every family in twelve pairs and more. Engines of four
# are slow on two cores: their ranks wait for each other without letting go of one.
DENSE = [
    Pair(Case("qwen2_tied", tp=2, pp=2), 2),
    Pair(Case("qwen2_tied", pp=2, vpp=2), 2),
]
EXPERTS = [Pair(Case("dsv3", tp=2, pp=2, ep=2), 2)]
MORE = [Pair(Case("mixtral", tp=2, ep=2, etp=2), 2), Pair(Case("qwen3", tp=2, pp=2), 4), Pair(Case("dsv3", tp=4), 2)]
SETS = [
    pytest.param(DENSE, id="dense"),
    pytest.param(EXPERTS, id="experts"),
    pytest.param(MORE, id="more", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weight_syncs.make_models(tmp_path_factory.mktemp("models"), FAMILIES)


@pytest.fixture(scope="module", params=SETS)
def outcomes(request: pytest.FixtureRequest, models: Path) -> dict[Pair, list[weight_syncs.Outcome]]:
    pairs = request.param
    ranks = run_ranks(weight_syncs.try_pairs, weight_syncs.WORLD_SIZE, models, pairs, timeout=1200)
    return dict(zip(pairs, zip(*ranks, strict=True), strict=True))


def test_the_engine_is_the_one_that_read_the_weights_from_disk(outcomes):
    wrong = {str(pair): row for pair, row in outcomes.items() if not all(o.tokens and o.gap == 0.0 for o in row)}
    assert not wrong


def test_each_rank_receives_what_it_lacks_once(outcomes):
    assert all(o.received == o.least for row in outcomes.values() for o in row)
    assert any(o.received for row in outcomes.values() for o in row)


# ---- one actor and one engine through many weight syncs


def live(models: Path) -> dict[str, Any]:
    """Two ranks, training tp 2, engines of tp 1: weight syncs that are repeated, disturbed or spoilt."""
    rank, pair = dist.get_rank(), Pair(Case("qwen3moe", tp=2, ep=2), 1)
    folders = {letter: models / "qwen3moe" / letter for letter in "ab"}
    stock = {letter: engines.stock_greedy(folder, 1) for letter, folder in folders.items()}
    engine = engines.build(folders["a"], 1)
    equality.keep_groups()
    actor = equality.actor(folders["a"], pair.case)
    manager = weight_syncs.make_manager(actor, engine, pair)
    found: dict[str, Any] = {}

    def answers_as(letter: str) -> bool:
        return engines.greedy(engine) == stock[letter]

    with manager:
        found["first"] = answers_as("a")
    actor.load_pretrained(folders["b"])
    with manager:
        found["after sleep"] = answers_as("b")
    resident = []
    for _ in range(10):
        manager.sync()
        resident.append(engines.resident_bytes())
    found["ten in a row"] = answers_as("b")
    found["growth"] = resident[-1] - resident[2]

    if rank == 1:
        engines.vllm_engine(engine).add_request("0", *_request(engine))
    found["in flight"] = _refused(manager.sync, ReshardError)
    if rank == 1:
        engines.vllm_engine(engine).abort_request(["0"])
    found["refused weight sync changed nothing"] = answers_as("b")
    actor.load_pretrained(folders["a"])
    manager.sync()
    found["after refusal"] = answers_as("a")

    write = manager.write

    def spoil() -> None:
        write()
        if rank == 0:
            parameters = parameters_of(manager)
            name = next(name for name in parameters if name.endswith("1.mlp.experts.routed_experts.w2_weight"))
            parameters[name][3, 5, 7] += 1e-3

    manager.write = spoil
    found["spoilt"] = _refused(manager.sync, ReshardError)
    manager.write = write
    manager.sync()
    found["restored"] = answers_as("a")
    found["weight syncs"] = manager._weight_syncs
    engine.sleep()
    for method in ("direct", "gather"):
        found[method] = _order(weight_syncs.make_manager(actor, engine, pair, method=method), engine)
    return found


def _order(manager: Any, engine: Any) -> list[str]:
    """What a weight sync to a sleeping engine does about the device's memory, as on a GPU."""
    calls: list[str] = []
    wake_up = engines.vllm_engine(engine).wake_up

    def wake(tags: list[str]) -> None:
        calls.extend(f"wake {tag}" for tag in tags)
        wake_up(tags=tags)

    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: calls.append("empty cache"))
    with (
        mock.patch.object(offload, "torch", SimpleNamespace(cuda=cuda)),
        mock.patch.object(offload, "gc", SimpleNamespace(collect=lambda: calls.append("collect garbage"))),
        mock.patch.object(engines.vllm_engine(engine), "wake_up", wake),
        manager,
    ):
        pass
    return calls


def _request(engine: Any) -> tuple[Any, Any]:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    return tokens_input([5, 6, 7]), SamplingParams(max_tokens=8)


def _refused(action: Any, error: type[Exception]) -> str:
    try:
        action()
    except error as raised:
        return str(raised)
    return ""


@pytest.fixture(scope="module")
def lived(models: Path) -> list[dict[str, Any]]:
    return run_ranks(live, 2, models, timeout=600)


@pytest.mark.parametrize("moment", ["first", "after sleep", "ten in a row", "after refusal", "restored"])
def test_the_newest_weights_answer(lived, moment):
    assert [rank[moment] for rank in lived] == [True, True]


def test_many_weight_syncs_leave_no_memory_behind(lived):
    assert max(rank["growth"] for rank in lived) < 4 << 20


def test_a_weight_sync_beneath_requests_is_refused_on_every_rank_and_changes_nothing(lived):
    for rank in lived:
        assert rank["in flight"].startswith("weights cannot be synced while requests are in flight")
        assert "rank 1: 1 requests" in rank["in flight"]
        assert rank["refused weight sync changed nothing"]


def test_one_changed_element_of_an_expert_is_named_on_every_rank(lived):
    for rank in lived:
        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        assert rank["spoilt"] == f"weights differ after a weight sync: rank 0: {name}"


def test_weight_syncs_that_came_through_are_counted(lived):
    assert [rank["weight syncs"] for rank in lived] == [14, 14]


@pytest.mark.parametrize("method", ["direct", "gather"])
def test_pytorch_s_cache_is_empty_when_the_engine_takes_memory(lived, method):
    freed = ["collect garbage", "empty cache"]
    for rank in lived:
        assert rank[method] == [*freed, "wake weights", *freed, "wake kv_cache"]


# ---- training and rollout on ranks of their own


def apart(models: Path) -> list[bool]:
    """Training on ranks 0 and 1, an engine of two on ranks 2 and 3. The other halves have other weights or none."""
    a, b = models / "qwen2" / "a", models / "qwen2" / "b"
    rank, stock = dist.get_rank(), engines.stock_greedy(b, 2)
    engine = engines.build(a, 2)
    equality.keep_groups()
    actor = equality.actor(b if rank < 2 else a, Case("qwen2", tp=2))
    sides = sync_sides(actor.weights.shape, actor.layout, EngineLayout(2), [0, 1], [2, 3])
    job = Job(2, torch.float32, torch.device("cpu"))
    mine = (actor, None) if rank < 2 else (None, engine)
    manager = ReshardManager(*mine, sides, ReshardSection(verify="always", bucket_mib=1), job)
    with manager:
        first = rank < 2 or engines.greedy(engine) == stock
    manager.sync()
    return [first, rank < 2 or engines.greedy(engine) == stock, bool(manager.plan.traffic[rank].received) == (rank > 1)]


def test_training_and_rollout_may_be_on_ranks_of_their_own(models):
    assert run_ranks(apart, 4, models, timeout=600) == [[True] * 3] * 4


# ---- memory in common


def share(models: Path) -> dict[str, Any]:
    """Two ranks, the same cut on both sides: which parameters of the engine lie in the trainer's memory."""
    a, b = models / "qwen3moe" / "a", models / "qwen3moe" / "b"
    pair = Pair(Case("qwen3moe", tp=2), 2)
    stock = {folder: engines.stock_greedy(folder, 2) for folder in (a, b)}
    engine = engines.build(b, 2)
    equality.keep_groups()
    actor = equality.actor(a, pair.case)
    manager = weight_syncs.make_manager(actor, engine, pair, share_weights=True)
    trainers = {tensor.untyped_storage().data_ptr() for tensor in actor.weights.parameters()}
    with manager:
        same = [engines.greedy(engine) == stock[a]]
        live = dict(engines.worker(engine).model_runner.get_model().named_parameters())
        found = {name for name, own in live.items() if own.numel() and own.untyped_storage().data_ptr() in trainers}
    actor.load_pretrained(b)
    with manager:
        same.append(engines.greedy(engine) == stock[b])
    return {"same": same, "in common": found, "may be": engine.shareable()}


def test_parameters_that_are_the_same_on_both_sides_can_lie_in_one_memory(models):
    for rank in run_ranks(share, 2, models, timeout=600):
        assert rank["same"] == [True, True]
        assert rank["in common"] <= rank["may be"]
        assert {"model.norm.weight", "model.layers.3.self_attn.k_norm.weight"} <= rank["in common"]
        assert len(rank["in common"]) > 4 * 4  # four norms of each of four layers, and more
