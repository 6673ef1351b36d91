"""Checkpoints that megatron-core's own models load, and those that they save, in their own names and folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.convert.helpers import differing, to_huggingface, to_megatron
from tests.helpers.distributed import run_ranks
from tests.helpers.equality import Case, actor
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, optimizer_section


@dataclass(frozen=True)
class PeerCase:
    """``cut``: layout that the conversion cuts for; ``load``, ``save``: of the peer, which saves with the names of
    ``spec``, and layer by layer if ``per_layer``."""

    kind: str
    cut: dict[str, int]
    load: Case
    save: Case
    spec: str = "te"
    per_layer: bool = False


# What megatron-core's latent attention can be: its yarn has other parameters, and it always rotates by pairs.
LATENT: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True,
}
CASES = [
    PeerCase("qwen3moe", {"ep": 4}, Case("qwen3moe", ep=2), Case("qwen3moe", tp=2, pp=2, ep=1), per_layer=True),
    PeerCase("dsv3", {"tp": 2, "pp": 2}, Case("dsv3", ep=4), Case("dsv3", pp=2, ep=2)),
]
MORE = [
    PeerCase("qwen3", {"tp": 4}, Case("qwen3", tp=2), Case("qwen3", pp=2)),
    PeerCase("llama", {"pp": 2}, Case("llama", tp=4), Case("llama", tp=2, pp=2), spec="local"),
    PeerCase("qwen2", {"tp": 2}, Case("qwen2", tp=1), Case("qwen2", tp=4), per_layer=True),
    PeerCase("qwen2_tied", {}, Case("qwen2_tied", tp=2), Case("qwen2_tied", tp=4)),
    PeerCase("mixtral", {"ep": 2, "etp": 2, "tp": 2}, Case("mixtral", ep=4), Case("mixtral", pp=2, ep=2)),
    PeerCase("qwen3moe", {}, Case("qwen3moe", ep=4), Case("qwen3moe", ep=2), spec="local"),
    PeerCase("dsv3", {"ep": 4}, Case("dsv3", ep=2), Case("dsv3", ep=4), spec="local", per_layer=True),
    PeerCase("dsv3_direct", {"ep": 8}, Case("dsv3_direct", ep=2), Case("dsv3_direct", pp=2, ep=2)),
]


@dataclass(frozen=True)
class Found:
    """``apart``: largest difference of logits; ``common``: values of the converted folder; digests of our back end's
    weights from both folders; ``iteration``: of its checkpoint, if the peer has loaded the same weights from it."""

    apart: float
    common: dict[str, Any]
    expected: str
    loaded: str
    iteration: int


def load_and_save(folder: Path, cases: list[PeerCase]) -> list[Found]:
    """On each rank."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from rlhpc.checkpoint.formats.described import describe_model
    from tests.convert.megatron_peer import (
        build_peer,
        copy_to_local,
        load_as_megatron_lm,
        logits_of,
        save_as_megatron_lm,
        spoil,
        weights_of,
    )

    found = []
    for number, case in enumerate(cases):
        here = folder / f"{number}-{case.kind}"
        shape: Any = describe_model(here / "hf")
        model = AutoModelForCausalLM.from_pretrained(here / "hf", dtype=torch.float32, attn_implementation="eager")
        inv_freq, tokens = model.model.rotary_emb.inv_freq, torch.arange(24) * 7 % shape.vocab_size
        with torch.no_grad():
            expected = model(tokens[None]).logits[0]
        layout = actor(here / "hf", case.load).layout  # builds the groups
        peer = build_peer(shape, layout, "te", inv_freq)
        spoil(peer)
        common = load_as_megatron_lm(peer, here / "megatron")
        logits = logits_of(peer, tokens)[:, : shape.vocab_size]
        ours = actor(here / "hf", case.save, optimizer_section())
        peer = saving = build_peer(shape, ours.layout, "te", inv_freq)
        load_as_megatron_lm(peer, here / "megatron")
        if case.spec == "local":
            saving = build_peer(shape, ours.layout, "local", inv_freq)
            copy_to_local(peer, saving)
        save_as_megatron_lm(saving, here / "theirs", 350, per_layer=case.per_layer)
        reference = digest(ours)
        for parameter in ours.weights.parameters():
            parameter.data.fill_(0.5)
        ours.load_pretrained(here / "theirs")
        loaded, weights = digest(ours), weights_of(peer)
        if dist.get_rank() == 0:
            (here / "run").mkdir()
        dist.barrier()
        ours.save(here / "run", 7)
        spoil(peer)
        of_run = load_as_megatron_lm(peer, here / "run")
        same = all(torch.equal(value, weights[name]) for name, value in weights_of(peer).items())
        apart = float((logits - expected).abs().max())
        values = {**common, "args": vars(common["args"])}
        found.append(Found(apart, values, reference, loaded, of_run["iteration"] if same else -1))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_megatron_core_loads_what_is_written_and_what_it_saves_is_read(tmp_path: Path, cases: list[PeerCase]) -> None:
    for number, case in enumerate(cases):
        here = tmp_path / f"{number}-{case.kind}"
        changes = LATENT if case.kind.startswith("dsv3") else {}
        to_megatron(
            make_model(here / "hf", case.kind, num_hidden_layers=4, vocab_size=67, **changes),
            here / "megatron",
            **case.cut,
        )
    ranks = run_ranks(load_and_save, 4, tmp_path, cases, timeout=900)
    for number, case in enumerate(cases):
        here = tmp_path / f"{number}-{case.kind}"
        for found in (rank[number] for rank in ranks):
            assert found.apart < 1e-5, case
            assert found.loaded == found.expected, case
            assert found.iteration == 7, (case, "a run's own checkpoint")
        common = ranks[0][number].common
        assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
        assert common["args"]["num_layers"] == 4
        again = to_megatron(here / "theirs", here / "again", model=here / "hf", **case.cut)
        for source in (here / "theirs", again):
            back = to_huggingface(source, here / f"back of {source.name}", model=here / "hf")
            assert not differing(here / "hf", back), (case, source)
