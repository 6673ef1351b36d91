"""Converted folders in the real megatron-core, in layouts other than the one they were cut for, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint.formats.torch_dist_metadata import read_index
from tests.convert.helpers import differing, to_huggingface, to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, optimizer_section, train

# Cut for one layout, loaded in another.
Cases = list[tuple[dict[str, int], Case]]
CASES: Cases = [
    ({}, Case("qwen2_tied", tp=2, pp=2, vpp=2)),
    ({"tp": 2, "ep": 2}, Case("dsv3", pp=2, ep=2)),
]
MORE: Cases = [
    ({"pp": 2}, Case("qwen2", tp=4)),
    ({"ep": 2, "etp": 2, "tp": 2}, Case("mixtral", tp=2, ep=4)),
    ({"tp": 4}, Case("llama", tp=2, pp=2)),
    ({"tp": 2, "pp": 2}, Case("qwen3")),
    ({"ep": 4}, Case("qwen3moe", pp=2, tp=2, ep=1, etp=2)),
    ({"ep": 8}, Case("dsv3_direct", tp=4, ep=4)),
]


@dataclass(frozen=True)
class Found:
    """Digests of the HuggingFace folder and of the converted one as loaded; (loss, gradient norm) of the updates after
    a checkpoint, and again from that checkpoint resharded for another layout."""

    expected: str
    loaded: str
    went_on: list[tuple[float, float]]
    again: list[tuple[float, float]]


def load_and_save(folder: Path, cases: Cases) -> list[Found]:
    """On each rank."""
    import torch.distributed as dist

    found = []
    for axes, case in cases:
        here = folder / case.kind
        backend: Any = actor(here / "hf", case, optimizer_section())
        expected = digest(backend)
        for parameter in backend.weights.parameters():
            parameter.data.fill_(0.5)
        backend.load_pretrained(here / "megatron")
        loaded = digest(backend)
        for name in ("saved", "trained"):
            (here / name).mkdir(exist_ok=True)
            backend.save(here / name)
            train(backend)
        backend.load(here / "trained")
        went_on = train(backend, 2)
        if dist.get_rank() == 0:
            to_megatron(here / "trained", here / "resharded", model=here / "hf", **axes)
        dist.barrier()
        backend.load(here / "resharded")
        found.append(Found(expected, loaded, went_on, train(backend, 2)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_families_load_in_another_layout_and_come_back_from_what_is_saved_there(tmp_path: Path, cases: Cases) -> None:
    for axes, case in cases:
        model = make_model(tmp_path / case.kind / "hf", case.kind, num_hidden_layers=4, vocab_size=67)
        to_megatron(model, tmp_path / case.kind / "megatron", **axes)
    ranks = run_ranks(load_and_save, 4, tmp_path, cases, timeout=900)
    for (_, case), found in zip(cases, ranks[0], strict=True):
        assert found.loaded == found.expected, case
        assert found.again == found.went_on, case
        here = tmp_path / case.kind
        saved, converted = read_index(here / "saved" / "iter_0000000"), read_index(here / "megatron" / "release")
        weights = {key for key in saved.tensors if not key.startswith("optimizer.")}
        assert converted.tensors.keys() == weights
        assert converted.objects.keys() == {key for key in saved.objects if "_extra_state" in key}
        assert not differing(here / "hf", to_huggingface(here / "saved", here / "back", model=here / "hf"))
