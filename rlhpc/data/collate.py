"""Packs sequences into a batch, and unpacks per-token results. Vectorized, since it runs on every step's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlhpc.api import KeptTokens, PackedBatch


@dataclass(frozen=True)
class _Spans:
    """Positions of a packed batch at which the response tokens of its sequences are predicted."""

    starts: np.ndarray  # [S] first token of each sequence
    response_lengths: np.ndarray  # [S]
    places: np.ndarray  # [sum of response lengths] packed positions, sequence by sequence

    @classmethod
    def of(cls, lengths: np.ndarray, prompt_lengths: np.ndarray) -> _Spans:
        starts = np.cumsum(lengths) - lengths
        response_lengths = lengths - prompt_lengths
        # Response token i of a sequence with a prompt of p tokens is predicted at its position p - 1 + i.
        first = starts + prompt_lengths - 1
        return cls(starts, response_lengths, np.repeat(first, response_lengths) + _counted(response_lengths))


def pack_batch(
    sequences: Sequence[tuple[np.ndarray, int]],
    *,
    sample_ids: Sequence[int],
    weights: Sequence[float] | None = None,
    response_mask: Sequence[np.ndarray | None] | None = None,
    per_token: Mapping[str, Sequence[np.ndarray]] | None = None,
    routed_experts: Sequence[np.ndarray | None] | None = None,
) -> PackedBatch:
    """Packs (tokens [L], prompt length) sequences end to end.

    ``weights``: loss weight per response token of each sequence (default 1), 0 where ``response_mask`` (bool
    [response], None: all true) is false. ``per_token``: named values per response token, placed where that token is
    predicted, 0 elsewhere. ``routed_experts``: experts of all tokens of a sequence but the last; None: unknown.
    """
    assert len(sequences) == len(sample_ids) > 0
    lengths = np.array([len(tokens) for tokens, _ in sequences])
    prompt_lengths = np.array([prompt_len for _, prompt_len in sequences])
    assert ((prompt_lengths > 0) & (prompt_lengths <= lengths)).all(), (
        "a prompt has at least one token and fits its sequence"
    )
    spans = _Spans.of(lengths, prompt_lengths)
    total = int(lengths.sum())

    tokens = np.concatenate([tokens for tokens, _ in sequences]).astype(np.int64)
    targets = np.zeros(total, dtype=np.int64)
    targets[:-1] = tokens[1:]
    targets[spans.starts + lengths - 1] = 0  # the following token belongs to the next sequence
    loss_weight = np.zeros(total, dtype=np.float32)
    loss_weight[spans.places] = np.repeat(np.ones(len(lengths)) if weights is None else weights, spans.response_lengths)
    if response_mask is not None:
        loss_weight[spans.places] *= np.concatenate(
            [np.ones(n) if own is None else own for own, n in zip(response_mask, spans.response_lengths, strict=True)]
        )

    extra: dict[str, Tensor] = {}
    for name, values in (per_token or {}).items():
        assert [len(v) for v in values] == spans.response_lengths.tolist(), f"{name}: one value per response token"
        scattered = np.zeros(total, dtype=np.float32)
        scattered[spans.places] = np.concatenate(values)
        extra[name] = torch.from_numpy(scattered)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(_counted(lengths)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        loss_weight=torch.from_numpy(loss_weight),
        sample_ids=tuple(sample_ids),
        routed_experts=None if routed_experts is None else _packed_routed_experts(routed_experts, spans.starts, total),
        extra=extra,
    )


def with_kept(batch: PackedBatch, kept: Sequence[KeptTokens | None], prompt_lengths: Sequence[int]) -> PackedBatch:
    """The batch with what each sample's response tokens were drawn from; None: the whole vocabulary."""
    if not any(one is not None and len(one.tokens) for one in kept):
        return batch
    spans = _Spans.of(np.diff(batch.cu_seqlens.numpy()), np.asarray(prompt_lengths))
    lengths = spans.response_lengths
    every = KeptTokens.joined([one or KeptTokens.whole(int(n)) for one, n in zip(kept, lengths, strict=True)])
    assert len(every.counts) == len(spans.places), "kept tokens of each response token"
    packed = np.zeros((len(batch.tokens), int(every.counts.max())), dtype=np.int32)
    packed[np.repeat(spans.places, every.counts), _counted(every.counts)] = every.tokens + 1
    return replace(batch, kept=torch.from_numpy(packed))


def _packed_routed_experts(
    routed_experts: Sequence[np.ndarray | None], starts: np.ndarray, total: int
) -> Tensor | None:
    """int16 [total, layers, top_k], 0 where the expert is unknown; None if all are unknown."""
    known = [(start, one) for start, one in zip(starts, routed_experts, strict=True) if one is not None]
    if not known:
        return None
    packed = np.zeros((total, *known[0][1].shape[1:]), dtype=np.int16)
    for start, one in known:
        np.add(one, 1, out=packed[start : start + len(one)], casting="unsafe", dtype=np.int16)
    return torch.from_numpy(packed)


def unpack(batch: PackedBatch, values: Tensor, prompt_lengths: Sequence[int]) -> list[np.ndarray]:
    """Per-token ``values`` [T] of a packed batch as one float32 array [response] per sample, in order."""
    assert len(prompt_lengths) == len(batch.sample_ids)
    if not batch.sample_ids:
        return []
    lengths = np.diff(batch.cu_seqlens.cpu().numpy())[: len(batch.sample_ids)]
    spans = _Spans.of(lengths, np.asarray(prompt_lengths))
    picked = values.detach().float().cpu().numpy()[spans.places]
    return np.split(picked, np.cumsum(spans.response_lengths)[:-1])


def _counted(lengths: np.ndarray) -> np.ndarray:
    """int64 counters 0, 1, … for each length, concatenated."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
