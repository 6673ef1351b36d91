"""The attention core's fused kernels: packed, cut over context-parallel ranks, in half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhpc.backends.kernels.exchanges import ContextIndex
from rlhpc.backends.kernels.packed_attention import Scores, attend
from rlhpc.backends.kernels.segments import Segments
from rlhpc.backends.megatron.packed import local_batch
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.groups import join
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
from tests.helpers.distributed import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

LONG = Case(8, 2, 128, 128, (700, 33, 1, 1500, 256))
ALL = {**CASES, "long": LONG, "long latent": Case(4, 4, 192, 128, LONG.lengths)}


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_is_near_to_float64(kernel: str, name: str, cp: int) -> None:
    """The queries of each rank in turn, to all keys: outputs, and gradients summed over the ranks."""
    case = ALL[name]
    query, key, value, gradient = inputs(case, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in (query, key, value)]
    split = split_context(case.lengths, cp)
    ranks = [ContextIndex(split, rank, query.device) for rank in range(cp)]
    gathered = [torch.cat([_take(x, rank.packed) for rank in ranks]) for x in leaves]
    parts = [
        attend(own, gathered[1][rank.visible], gathered[2][rank.visible], rank.chunks, Scores(case.dim**-0.5))
        for own, rank in zip(gathered[0].chunk(cp), ranks, strict=True)
    ]
    ours = outcome(torch.cat(parts)[ranks[0].gathered_of_packed], gradient, *leaves)
    assert _relative(ours, _exact(case, leaves, gradient, rotated=True)) < 2e-2


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), [(100, None, False), (None, 1.5, False), (None, None, True), (100, None, True)]
)
def test_forms_of_scores_are_near_to_float64(
    kernel: str, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """Outputs, and gradients of queries, keys, values and sinks."""
    if softcap is not None and kernel == "torch":
        pytest.skip("PyTorch's kernel has no softcap")
    lengths, scores = np.array(LONG.lengths), Scores(LONG.dim**-0.5, window, softcap)
    *leaves, gradient = inputs(LONG, torch.bfloat16, "cuda")
    if with_sinks:
        leaves.append(torch.linspace(-2, 3, LONG.heads, device="cuda"))
    leaves = [x.requires_grad_() for x in leaves]
    segments = Segments(lengths, lengths, leaves[0].device)
    ours = outcome(attend(*leaves[:3], segments, scores, *leaves[3:]), gradient, *leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    theirs = outcome(attend(*exact[:3], segments, scores, *exact[3:]), gradient, *exact)
    assert _relative(ours, theirs) < 2e-2


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_exact_as_on_a_cpu(name: str) -> None:
    case = CASES[name]
    local = local_batch(batch(case, "cuda"), split_context(case.lengths, 1), 0, rotary_table(case, "cuda"))
    *leaves, gradient = inputs(case, device="cuda")
    leaves = [x.requires_grad_() for x in leaves]
    ours = outcome(attention(case)(*leaves, packed_seq_params=local.params), gradient, *leaves)
    assert farthest(ours, _exact(case, leaves, gradient)) < 1e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["all_gather", "a2a"])
def test_two_gpus_equal_one(method: str) -> None:
    for differences in run_ranks(_over_nccl, 2, method, join=False):
        assert all(difference < 2e-2 for difference in differences.values()), differences


def _over_nccl(method: str) -> dict[str, float]:
    join(RankInfo.from_environ())
    group, found = dist.group.WORLD, {}
    for name, case in ALL.items():
        split = split_context(case.lengths, group.size(), align=2)
        local = local_batch(batch(case, "cuda"), split, group.rank(), rotary_table(case, "cuda"))
        *whole, gradient = inputs(case, torch.bfloat16, "cuda")
        leaves = [local.select(x).requires_grad_() for x in whole]
        output = local.gather(attention(case, method, group)(*leaves, packed_seq_params=local.params), group)
        output, *gradients = outcome(output, gradient, *leaves)
        ours = [output, *(local.gather(x, group) for x in gradients)]
        found[name] = _relative(ours, _exact(case, [x.requires_grad_() for x in whole], gradient))
    return found


def _take(values: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return values[packed.clamp(min=0)].masked_fill((packed < 0)[:, None, None], 0)


def _exact(case: Case, leaves: list[torch.Tensor], gradient: torch.Tensor, rotated: bool = False) -> Any:
    """What the same inputs give in float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    return outcome(one_at_a_time(case, *exact, rotates=case.rotates and not rotated), gradient, *exact)


def _relative(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The greatest distance, over its tensor's size."""
    pairs = zip(ours, exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)
