"""Packed attention in transformers' models: against one document at a time, and over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.core.errors import UserError
from tests.helpers.cases import long_but
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_architectures import (
    ARCHITECTURES,
    LENGTHS,
    build,
    documents,
    farthest_gradient,
    gradients,
    loss_of,
)

Found = tuple[Tensor, dict[str, Tensor]]
SOME = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
# Variants for the exchanges: (architecture, changes, exchange requested, exchange expected at cp 2)
EXCHANGES: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    **{f"{kind}, heads": (kind, {}, None, "ulysses") for kind in ARCHITECTURES},
    **{f"{kind}, keys": (kind, {}, "all_gather", "all_gather") for kind in ARCHITECTURES},
    "one key head": ("qwen2", {"num_key_value_heads": 1}, None, "ulysses"),
    "three key heads": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, None, "ulysses"),
    "three heads": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1}, None, "all_gather"),
    "three heads with sinks": (
        "gpt_oss",
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        "ulysses",
        "all_gather",
    ),
}
SOME_EXCHANGES = (
    *("llama, heads", "gemma2, heads", "deepseek_v3, heads", "gpt_oss, heads", "gpt_oss, keys"),
    *("one key head", "three heads", "three heads with sinks"),
)
MORE_EXCHANGES = tuple(name for name in EXCHANGES if name not in SOME_EXCHANGES)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", long_but(SOME, ARCHITECTURES))
def test_packed_equals_one_document_at_a_time(kind: str) -> None:
    """Logits, and gradients of all parameters."""
    model = build(kind, _registered())
    logits, of_packed = _packed(model)
    model.set_attn_implementation("eager")
    expected, of_single = _one_at_a_time(model)
    assert float(expected.abs().max()) > 0.3
    assert float((logits - expected).abs().max()) < 1e-5
    assert farthest_gradient(of_packed, of_single) < 1e-5


@pytest.mark.heavy
def test_recomputation_sees_the_same_documents() -> None:
    model = build("mistral", _registered())
    expected = _packed(model)
    model.train()
    model.gradient_checkpointing_enable()
    logits, found = _packed(model)
    assert torch.equal(logits, expected[0])
    assert farthest_gradient(found, expected[1]) == 0


def test_attention_takes_the_innermost_pack_and_none_outside() -> None:
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to, current_pack

    outer, inner = (DocumentPack(lengths, torch.device("cpu")) for lengths in ([3, 4], [5]))
    with attending_to(outer):
        with attending_to(inner):
            assert current_pack() is inner
        assert current_pack() is outer
    with pytest.raises(AssertionError, match="outside of attending_to"):
        current_pack()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "changes", "feature"),
    [
        ("llama4_text", {}, "llama4_text: the architecture has attention in chunks"),
        ("phimoe", {}, "phimoe: the architecture has a sliding window in its mask alone"),
        ("qwen3_next", {}, "qwen3_next: the architecture has layers of linear_attention"),
        ("llama", {"attention_dropout": 0.1}, "llama: the architecture has attention dropout of 0.1"),
    ],
)
def test_what_would_be_wrong_is_refused(kind: str, changes: dict[str, Any], feature: str) -> None:
    model = build(kind, _registered(), **changes).train()
    with pytest.raises(UserError, match=feature):
        _packed(model)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"attention_mask": torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS))}, "an attention mask of its own"),
        ({"indices": torch.zeros(1)}, "sparse attention"),
        ({"slopes": torch.zeros(1)}, "an input slopes of attention"),
        ({"is_causal": False}, "attention to later tokens"),
    ],
)
def test_unknown_inputs_are_refused(given: dict[str, Any], feature: str) -> None:
    with pytest.raises(UserError, match=feature):
        _packed(build("llama", _registered()), **given)


def test_short_documents_need_neither_chunks_nor_windows() -> None:
    from types import SimpleNamespace

    from rlhpc.backends.fsdp.attention_interface import traits_of

    config = SimpleNamespace(sliding_window=16, attention_chunk_size=16, layer_types=["chunked_attention"])
    chunked = SimpleNamespace(config=config, layer_idx=0)
    sliding = SimpleNamespace(config=SimpleNamespace(sliding_window=16), layer_idx=0)
    assert [traits_of(module).limit for module in (chunked, sliding)] == [16, 16]
    assert traits_of(sliding).other_limit is None
    assert traits_of(chunked).reason(16) == "attention in chunks shorter than a document"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, SOME_EXCHANGES),
        pytest.param(2, MORE_EXCHANGES, marks=pytest.mark.long),
        pytest.param(4, tuple(EXCHANGES), marks=pytest.mark.long),
    ],
    ids=["2", "2 more", "4"],
)
def test_ranks_equal_one(count: int, names: tuple[str, ...]) -> None:
    """Logits, and gradients of parameters summed over the ranks."""
    for found in run_ranks(_measure, count, names):
        assert found.keys() == set(names)
        for name, (method, of_logits, of_gradients) in found.items():
            assert method == EXCHANGES[name][3] or count > 2, name
            assert of_logits < 1e-5, name
            assert of_gradients < 1e-5, name


def _measure(names: tuple[str, ...]) -> dict[str, Any]:
    """For each variant: the exchange, and the differences of logits and gradients to a single rank."""
    from rlhpc.sharding.layout import choose_context_method

    found: dict[str, Any] = {}
    single: dict[str, Any] = {}
    for name in names:
        kind, changes, requested, _ = EXCHANGES[name]
        if changes or kind not in single:
            model = build(kind, _registered(), **changes)
            single[kind] = (model, *_packed(model))
        model, expected, theirs = single[kind]
        logits, ours = _packed(model, dist.group.WORLD, requested)
        for gradient in ours.values():
            dist.all_reduce(gradient)
        heads = model.config.num_attention_heads, model.config.num_key_value_heads
        method = choose_context_method(*heads, dist.get_world_size(), requested).method
        found[name] = (method, float((logits - expected).abs().max()), farthest_gradient(ours, theirs))
    return found


def _registered() -> str:
    from rlhpc.backends.fsdp.attention_interface import register

    return register()


def _packed(model: Any, group: Any = None, cp_method: Any = None, **given: Any) -> Found:
    """Logits [T, vocab] of all documents in one row, and gradients; of this rank's part with a group."""
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to

    pack = DocumentPack(LENGTHS, torch.device("cpu"), group, cp_method)
    inputs = {"input_ids": pack.select(torch.cat(documents()))[None], "position_ids": pack.positions[None], **given}
    with attending_to(pack):
        logits = pack.gather(model(**inputs, use_cache=False).logits[0])
        loss_of(logits).backward()
    return logits.detach(), gradients(model)


def _one_at_a_time(model: Any) -> Found:
    logits = torch.cat([model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in documents()])
    loss_of(logits).backward()
    return logits.detach(), gradients(model)
