"""The attention core on one rank: packed sequences against one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.backends.kernels.exchanges import ContextIndex
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.backends.kernels.segments import Segments
from rlhpc.backends.megatron.packed import local_batch
from rlhpc.sharding.context_split import split_context
from tests.helpers.attention_cases import (
    CASES,
    Case,
    attention,
    batch,
    farthest,
    inputs,
    one_at_a_time,
    outcome,
    rotary_table,
)


def run(case: Case, align: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    local = local_batch(batch(case), split_context(case.lengths, cp=1, align=align), 0, rotary_table(case))
    *leaves, gradient = inputs(case, dtype)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = attention(case)(*map(local.select, leaves), packed_seq_params=local.params)
    return outcome(local.gather(output, None), gradient, *leaves)


@pytest.mark.heavy
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_packed_equals_one_sequence_at_a_time(name: str, align: int) -> None:
    """Outputs, and gradients of queries, keys and values."""
    case = CASES[name]
    *leaves, gradient = (x.double() for x in inputs(case))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert farthest(run(case, align), outcome(one_at_a_time(case, *leaves), gradient, *leaves)) < 1e-5


def test_bfloat16_stays_bfloat16() -> None:
    case = CASES["grouped queries"]
    outputs = run(case, dtype=torch.bfloat16)
    assert {x.dtype for x in outputs} == {torch.bfloat16}
    assert farthest(outputs[:1], run(case)[:1]) < 0.05


def test_segments_see_the_keys_that_end_with_them() -> None:
    """Fewer queries than keys: the last query sees the last key, the one before it all but that."""
    torch.manual_seed(0)
    queries, keys = np.array([3, 4, 1, 40, 2]), np.array([3, 9, 6, 60, 33])
    q, k, v = torch.randn(50, 2, 8), torch.randn(111, 1, 8), torch.randn(111, 1, 8)
    output, query, first = attend(q, k, v, Segments(queries, keys, torch.device("cpu")), Scores(0.3)), 0, 0
    for a, b in zip(queries, keys, strict=True):
        for j in range(a):
            seen = slice(first, first + b - a + j + 1)
            weights = (q[query + j] @ k[seen, 0].T * 0.3).softmax(-1)
            torch.testing.assert_close(output[query + j], weights @ v[seen, 0], atol=1e-5, rtol=0)
        query, first = query + a, first + b


FORMS: dict[str, dict[str, Any]] = {
    "window": {"window": 4},
    "window of one key": {"window": 1},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "values longer than keys": {"value_dim": 11, "sinks": True},
    "all": {"window": 5, "softcap": 0.7, "sinks": True},
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_scores_equal_one_query_at_a_time(name: str) -> None:
    """Outputs and gradients, with as many queries as keys and with fewer."""
    torch.manual_seed(0)
    queries, keys = np.array([3, 4, 1, 40, 2, 36, 2]), np.array([3, 9, 6, 60, 33, 36, 2])
    value_dim = FORMS[name].get("value_dim", 6)
    sizes = [(queries.sum(), 4, 8), (keys.sum(), 2, 8), (keys.sum(), 2, value_dim), (4,), (queries.sum(), 4, value_dim)]
    *leaves, gradient = (torch.randn(*map(int, size), dtype=torch.float64) for size in sizes)
    leaves = [leaf.requires_grad_() for leaf in leaves[: 4 if "sinks" in FORMS[name] else 3]]
    scores = Scores(0.6, FORMS[name].get("window"), FORMS[name].get("softcap"))
    expected = outcome(_one_query_at_a_time(queries, keys, scores, *leaves), gradient, *leaves)
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    segments = Segments(queries, keys, torch.device("cpu"))
    found = outcome(attend(*single[:3], segments, scores, *single[3:]), gradient, *single)
    assert farthest(found, expected) < 1e-5


def _one_query_at_a_time(
    queries: np.ndarray, keys: np.ndarray, scores: Any, q: Any, k: Any, v: Any, sinks: Any = None
) -> torch.Tensor:
    outputs, query, first = [], 0, 0
    for a, b in zip(queries.tolist(), keys.tolist(), strict=True):
        for j in range(a):
            last = first + b - a + j + 1
            start = max(first, last - (scores.window or b))
            for head in range(q.size(1)):
                of_head = head // (q.size(1) // k.size(1))
                logits = k[start:last, of_head] @ q[query + j, head] * scores.scale
                if scores.softcap is not None:
                    logits = torch.tanh(logits / scores.softcap) * scores.softcap
                total = logits.exp().sum() + (0 if sinks is None else sinks[head].exp())
                outputs.append(logits.exp() / total @ v[start:last, of_head])
        query, first = query + a, first + b
    return torch.stack(outputs).unflatten(0, (len(q), -1))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_without_a_fused_kernel_few_calls_and_little_padding(cp: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 200).astype(int) + 1
    index = ContextIndex(split_context(lengths.tolist(), cp), 0, torch.device("cpu"))
    segments = index.chunks
    assert len(segments.buckets) < 40
    found = torch.cat([bucket.queries for bucket in segments.buckets])
    assert sorted(found.tolist()) == list(range(int(segments.query_lengths.sum())))
    padded = sum(bucket.query_rows.numel() * bucket.key_rows.size(1) for bucket in segments.buckets)
    assert padded < 2 * int((segments.query_lengths * segments.key_lengths).sum())
