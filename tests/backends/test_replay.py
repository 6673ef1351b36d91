"""Routed experts given to the routers: in every layout the model equals HuggingFace's, given the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.config.training import MemorySection
from rlhpc.data.collate import pack_batch, unpack
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import LAYERS, Case, actor, beside, gradients, save_gradients
from tests.helpers.tiny_models import KINDS, make_model
from tests.helpers.training import LENGTHS, TOKENS, negative_log_likelihood, optimizer_section, sequences

pytestmark = pytest.mark.ranks

FIRST = {"qwen3moe": 0, "dsv3": 1}  # layer with experts
FULL, EXPERTS = {"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}
# Layouts of 4 ranks with what is computed again.
CASES: list[tuple[Case, dict[str, Any]]] = [
    *[(Case(kind, ep=2), {}) for kind in FIRST],
    *[(Case(kind, tp=2, pp=2, ep=2), FULL) for kind in FIRST],
    (Case("dsv3", tp=2, cp=2, ep=4), {}),
    (Case("qwen3moe", pp=2, cp=2, ep=2, expert_dispatch="allgather"), EXPERTS),
    (Case("qwen3moe", pp=2, vpp=2), FULL),
    (Case("qwen3moe", tp=2, etp=2), EXPERTS),
]


@dataclass(frozen=True)
class Distance:
    """As in tests.helpers.equality, of the first update."""

    log_probs: float
    loss: float
    grad_norm: float
    gradient: float
    moved: float  # how far log-probs are from those of routers that choose for themselves


def routed_experts_of(kind: str) -> list[np.ndarray]:
    """Experts of each sequence's tokens but the last, which the routers would hardly choose."""
    rng = np.random.default_rng(0)
    fields = KINDS[kind][1]
    experts, layers = fields.get("num_experts") or fields["n_routed_experts"], LAYERS - FIRST[kind]
    scores = [rng.random((length - 1, layers, experts)) for length in LENGTHS]
    return [s.argsort(axis=-1)[..., :2].astype(np.uint8) for s in scores]


def told_reference(folder: Path, kind: str) -> Path:
    """folder/{start,gradients} and results.pt: what PyTorch computes with the routed experts given."""
    from transformers import AutoModelForCausalLM

    start = make_model(folder / "start", kind, num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="eager")
    routed_experts = [torch.from_numpy(r).long() for r in routed_experts_of(kind)]
    current = [0]

    def hook_of(place: int) -> Any:
        def hook(router: Any, _: Any, output: Any) -> Any:
            logits, _, index = output
            index = torch.cat([routed_experts[current[0]][:, place], index[-1:]])
            if kind == "dsv3":
                scores = logits.sigmoid().gather(1, index)
                return logits, 2.5 * scores / scores.sum(-1, keepdim=True), index
            return logits, logits.gather(1, index).softmax(-1), index

        return hook

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == routed_experts[0].size(1)
    for place, router in enumerate(routers):
        router.register_forward_hook(hook_of(place))
    log_probs = []
    for current[0], s in enumerate(sequences()):
        log_probs.append(model(s[None]).logits[0, :-1].log_softmax(-1).gather(-1, s[1:, None])[:, 0])
    loss = -torch.cat(log_probs).sum() / TOKENS
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer_section().max_grad_norm)
    save_gradients(model, folder / "gradients")
    numbers = (loss.item(), norm.item())
    torch.save({"log_probs": [x.detach() for x in log_probs], "numbers": numbers}, folder / "results.pt")
    return folder


def batches_of(kind: str, layout: Any, rank: int, replayed: bool = True) -> list[Any]:
    """This rank's share of the sequences in three microbatches, which leave one place of a round of two; routed
    experts of its own layers alone."""
    places, stage = layout.layer_places(LAYERS), layout.coord(rank)["pp"]
    own = tuple(n for n, layer in enumerate(range(FIRST[kind], LAYERS)) if places[layer][0] == stage)
    routed_experts, mine = routed_experts_of(kind), list(enumerate(sequences()))[layout.coord(rank)["dp"] :: layout.dp]
    parts = [mine[:1], mine[1:2], mine[2:]] if len(mine) > 2 else [mine]
    batches = [
        pack_batch(
            [(s.numpy(), 1) for _, s in part],
            sample_ids=[i for i, _ in part],
            routed_experts=[routed_experts[i][:, own] for i, _ in part] if replayed else None,
        )
        for part in parts
    ]
    return [replace(batch, routed_layers=own) for batch in batches]


def measure(references: dict[str, Path]) -> list[Distance]:
    return [_measure(references[case.kind], case, memory) for case, memory in CASES]


def _measure(reference: Path, case: Case, memory: dict[str, Any]) -> Distance:
    results = torch.load(reference / "results.pt")
    backend = actor(reference / "start", case, optimizer_section(), memory=MemorySection(**memory))
    batches, free = (batches_of(case.kind, backend.layout, dist.get_rank(), replayed) for replayed in (True, False))
    apart, moved = 0.0, 0.0
    for batch, stats, own in zip(batches, backend.log_probs(batches, 1.0), backend.log_probs(free, 1.0), strict=True):
        ones = [1] * len(batch.sample_ids)
        for i, ours in zip(batch.sample_ids, unpack(batch, stats.log_probs, ones), strict=True):
            apart = max(apart, float(np.abs(ours - results["log_probs"][i].numpy()).max()))
        moved = max(moved, float((stats.log_probs - own.log_probs).abs().max()))
    stats = backend.train(batches, negative_log_likelihood, TOKENS, 1.0, 1e-3)
    loss, norm = results["numbers"]
    gradient = max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-4))
        for ours, theirs in beside(gradients(backend), reference / "gradients")
    )
    norm_apart = abs(stats.grad_norm - norm) / norm
    return Distance(apart, abs(stats.sums["loss"] / TOKENS - loss) / loss, norm_apart, gradient, moved)


@pytest.fixture(scope="module")
def distances(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Distance]]:
    """Of each case, on every rank."""
    folder = tmp_path_factory.mktemp("replay")
    references = {kind: told_reference(folder / kind, kind) for kind in FIRST}
    found = zip(*run_ranks(measure, 4, references), strict=True)
    return {f"{case} {memory}": list(ranks) for (case, memory), ranks in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", [f"{case} {memory}" for case, memory in CASES])
def test_given_routed_experts_are_taken_in_every_layout(distances: dict[str, list[Distance]], case: str) -> None:
    for distance in distances[case]:
        assert max(distance.log_probs, distance.loss) < 1e-5, distance
        assert max(distance.grad_norm, distance.gradient) < 1e-4, distance
    assert max(distance.moved for distance in distances[case]) > 0.1
