"""A model with a value head, cut in its own way beside an actor, against HuggingFace's classifier under PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.api import LossSums
from rlhpc.data.collate import pack_batch
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import LENGTHS, TOKENS, make_actor, optimizer_section, save, sequences, train

pytestmark = pytest.mark.ranks

ACTOR = {"tp": 2}
CRITICS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "cp": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": False},
    {"pp": 2, "vpp": 2},
    {},
)
STEPS = 3


@pytest.fixture(scope="session")  # sharing models brings no test into a tier
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2_tied", num_hidden_layers=4)


def test_a_critic_of_any_layout_equals_one_rank(folder: Path, tmp_path: Path) -> None:
    """Values before and after three updates, and after a checkpoint of them is loaded in the next layout; norms of the
    gradients, whose scale the optimizer does not feel."""
    expected = _trained_by_torch(folder)
    for rank in run_ranks(_critics, 4, folder, tmp_path, timeout=600):
        for layout, found in zip(CRITICS, rank, strict=True):
            for values, truth in zip(found, expected, strict=True):
                assert np.abs(values - truth).max() < 1e-4, layout


def test_a_critic_takes_the_weights_of_an_actor_cut_otherwise(folder: Path) -> None:
    for found, expected in run_ranks(_taken, 2, folder):
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
        assert np.abs(found).max() > 0.1


def _batches(layout: Any) -> list[Any]:
    """Sequences with an own value to learn for each of their tokens, dealt out over data-parallel ranks."""
    own = list(enumerate(sequences()))[layout.coord(dist.get_rank())["dp"] :: layout.dp]
    batches = []
    for part in (own,) if len(own) < 2 else (own[::2], own[1::2]):
        batch = pack_batch([(s.numpy(), 1) for _, s in part], sample_ids=[i for i, _ in part])
        batches.append(replace(batch, extra={"returns": torch.sin(batch.tokens.float())}))
    return batches


def _loss(stats: Any, batch: Any) -> Any:
    error = (stats.values - batch.extra["returns"]).square()
    loss = 0.5 * (error * batch.loss_weight).sum()
    return LossSums(loss, {"loss": loss.detach()})


def _values(critic: Any, batches: list[Any]) -> np.ndarray:
    """Of all tokens, sequence by sequence."""
    mine: dict[int, np.ndarray] = {}
    for batch, stats in zip(batches, critic.values(batches), strict=True):
        parts = np.split(stats.values.numpy(), batch.cu_seqlens[1:-1].tolist())
        mine.update(zip(batch.sample_ids, parts, strict=True))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    found = {i: part for rank in ranks for i, part in rank.items()}
    return np.concatenate([found[i] for i in sorted(found)])


def _critics(folder: Path, saved: Path) -> list[tuple[np.ndarray, ...]]:
    actor = make_actor(folder, _section(), **ACTOR)
    results, previous = [], None
    for number, parallel in enumerate(CRITICS):
        critic = make_actor(folder, optimizer_section(), head="value", own_groups=True, **parallel)
        batches = _batches(critic.layout)
        before = _values(critic, batches)
        if previous is not None:
            critic.load(previous)
            loaded = _values(critic, batches)
            critic.load_pretrained(folder)
        norms = []
        for _ in range(STEPS):
            norms.append(critic.train(batches, _loss, TOKENS, 1.0, 1e-3).grad_norm)
            train(actor)  # takes its turn with the groups in force
        after = _values(critic, batches)
        previous = saved / str(number)
        save(critic, previous)
        results.append((before, after, loaded if number else after, np.array(norms)))
    assert len(before) == sum(LENGTHS)
    return results


def _section() -> Any:
    return optimizer_section()


def _taken(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values under one and the same head: of a critic with the weights of a trained actor, and of one with the same
    layout as the actor that has them by name."""
    actor = make_actor(folder, _section(), tp=2)
    train(actor, 2)
    found = []
    for parallel in ({"pp": 2}, {"tp": 2}):
        critic = make_actor(folder, optimizer_section(), head="value", own_groups=True, **parallel)
        critic.take_tensors(actor.full_tensors())
        critic.take_tensors([("score.weight", torch.linspace(-1, 1, 128)[None])])
        found.append(_values(critic, _batches(critic.layout)))
    return found[0], found[1]


def _trained_by_torch(folder: Path) -> tuple[np.ndarray, ...]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.score.weight.data.zero_()
    section = optimizer_section()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
    )

    def values(tokens: torch.Tensor) -> torch.Tensor:
        return model.score(model.model(tokens[None]).last_hidden_state)[0, :, 0]

    def all_values() -> np.ndarray:
        with torch.no_grad():
            return torch.cat([values(s) for s in sequences()]).numpy()

    before, norms = all_values(), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for s in sequences():
            error = (values(s) - torch.sin(s.float()))[:-1].square()
            (0.5 * error.sum() / TOKENS).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)))
        optimizer.step()
    after = all_values()
    return before, after, after, np.array(norms)
