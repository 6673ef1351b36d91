"""Head of a policy: vocabulary-parallel log-probs and entropy against PyTorch's softmax of whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlhpc.backends.kernels.loss_head import Head, head_stats
from rlhpc.config.training import MemorySection, ParallelSection
from rlhpc.models import shape_of
from rlhpc.parallel.compat import megatron_device
from rlhpc.parallel.groups import build_groups
from rlhpc.plan.estimates.activations import ActivationSetting, head_workspace
from rlhpc.sharding.layout import ParallelLayout, make_layout
from tests.helpers.distributed import run_ranks
from tests.helpers.live_memory import LiveMemory
from tests.helpers.published import QWEN25_72B

ROWS, WIDTH, VOCABULARY, PADDING = 201, 24, 509, 3  # columns that no token has, and that must not matter


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_to_softmax_with_gradients(world_size: int) -> None:
    for forward, backward in run_ranks(_differences, world_size):
        assert forward < 1e-5
        assert backward < 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_equal_to_softmax_over_the_kept_tokens(world_size: int) -> None:
    """Rows have up to 40 kept tokens, some on one rank alone; some rows have none, and are over all."""
    for forward, backward in run_ranks(_differences, world_size, 40):
        assert forward < 1e-5
        assert backward < 1e-5


def _kept(targets: torch.Tensor, most: int) -> torch.Tensor:
    """Random sets with the target, of the first half of the vocabulary in some rows; see ``PackedBatch.kept``."""
    kept = torch.zeros(ROWS, most, dtype=torch.int32)
    for row, target in enumerate(targets.tolist()):
        few = torch.randperm(VOCABULARY // (1 + row % 2))[: row % most].tolist()
        tokens = torch.tensor(sorted({*few, target})[:most] if target in few else [target, *few][:most])
        if row % 5:
            kept[row, : len(tokens)] = tokens + 1
    return kept


def _differences(most: int = 0) -> tuple[float, float]:
    from rlhpc.backends.kernels import loss_head as head

    head.BLOCK_BYTES, head.MIN_COLUMNS, head.CHUNK_ELEMENTS = 4 * ROWS * 100, 10, 4096  # the last ones are short
    torch.manual_seed(0)
    targets, a, b = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS), torch.randn(ROWS)
    kept = _kept(targets, most) if most else None
    plain = head.Head(VOCABULARY, dist.group.WORLD)
    forward = backward = 0.0
    for case, with_entropy in (
        (plain, True),
        (replace(plain, temperature=0.7), True),
        (replace(plain, temperature=0.7), False),
        (replace(plain, softcap=3.0), True),
        (replace(plain, softcap=3.0, scale=0.5, temperature=0.7), True),
    ):
        hidden = torch.randn(ROWS, WIDTH).requires_grad_()
        full = (torch.randn(VOCABULARY, WIDTH) * 0.8).requires_grad_()
        log_probs, entropy = _plain(hidden, full, targets, case, kept)
        (log_probs * a + (entropy * b if with_entropy else 0)).sum().backward()
        stats, mine, part = _ours(hidden.detach(), full.detach(), targets, case, kept)
        (stats.log_probs * a + (stats.entropy * b if with_entropy else 0)).sum().backward()
        dist.all_reduce(mine.grad)
        forward = max(forward, _far(stats.log_probs, log_probs), _far(stats.entropy, entropy))
        gradient = _part(torch.nn.functional.pad(full.grad, (0, 0, 0, PADDING)))
        largest = float(gradient.abs().max())
        backward = max(backward, _far(mine.grad, hidden.grad), _far(part.grad, gradient) / largest)
    return forward, backward


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Any, kept: torch.Tensor | None
) -> Any:
    logits = hidden @ weight.t()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits * head.scale / head.temperature
    if kept is not None:
        out = torch.ones(ROWS, VOCABULARY + 1, dtype=torch.bool).scatter_(1, kept.long(), False)[:, 1:]
        logits = logits.masked_fill(out & (kept > 0).any(1, keepdim=True), -torch.inf)
    found = torch.log_softmax(logits, -1)
    weighted = torch.where(found > -torch.inf, found.exp() * found, 0.0)
    return found.gather(-1, targets[:, None])[:, 0], -weighted.sum(-1)


def _ours(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Any, kept: torch.Tensor | None = None
) -> Any:
    """Stats, and the leaves with this rank's gradients."""
    part = _part(torch.nn.functional.pad(weight, (0, 0, 0, PADDING), value=9.0)).clone().requires_grad_()
    mine = hidden.clone().requires_grad_()
    return head_stats(mine, part, targets, head, kept), mine, part


def _part(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.ranks
def test_a_microbatch_without_trained_tokens_has_no_gradient() -> None:
    """As one that fills a round of interleaved stages has; autograd reaches both inputs all the same."""
    for stats, gradients in run_ranks(_of_no_rows, 2):
        assert stats == 0
        assert gradients == [0.0, 0.0]


def _of_no_rows() -> tuple[int, list[float]]:
    hidden, weight = torch.empty(0, WIDTH), torch.randn(VOCABULARY, WIDTH)
    stats, *leaves = _ours(hidden, weight, torch.empty(0, dtype=torch.int64), Head(VOCABULARY, dist.group.WORLD))
    (stats.log_probs.sum() + stats.entropy.sum()).backward()
    return len(stats.log_probs), [float(leaf.grad.abs().sum()) for leaf in leaves]


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


class _Group:
    """Of ``ranks`` ranks that never meet."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_buffer_receives_the_gradient_of_the_weight(tied: bool) -> None:
    """In float32, added to what is there; autograd gets nothing, or zeros where an embedding's is added to them."""
    from rlhpc.backends.kernels import loss_head as head

    torch.manual_seed(0)
    hidden, targets = torch.randn(9, WIDTH, dtype=torch.bfloat16), torch.randint(0, VOCABULARY, (9,))
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16).requires_grad_()
    case = head.Head(VOCABULARY, _Group(1))
    head.head_stats(hidden, weight, targets, case).log_probs.sum().backward()
    expected = weight.grad.float()
    weight.grad, weight.zero_out_wgrad, weight.main_grad = None, tied, torch.ones(VOCABULARY, WIDTH)
    head.head_stats(hidden, weight, targets, case).log_probs.sum().backward()
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-2, atol=1e-5)
    assert weight.grad_added_to_main_grad
    assert not tied or not weight.grad.any()


@pytest.mark.parametrize("vocabulary", [151936, 50257])
@pytest.mark.parametrize("rows", [16379, 4092, 7])
def test_rows_of_a_block_are_aligned_for_matrix_units(rows: int, vocabulary: int) -> None:
    """For any number of tokens, by which the columns of a block are chosen."""
    from rlhpc.backends.kernels import loss_head as head

    meta = torch.device("meta")
    hidden = torch.empty(rows, 64, dtype=torch.bfloat16, device=meta)
    weight = torch.empty(vocabulary, 64, dtype=torch.bfloat16, device=meta)
    blocks = list(head._blocks(hidden, weight, head.Head(vocabulary, _Group(1))))
    assert sum(block.size(1) for _, block in blocks) == vocabulary
    for start, block in blocks:
        assert start % 64 == block.stride(0) % 64 == block.storage_offset() == 0
        assert block.stride(1) == 1
        assert block.untyped_storage().nbytes() <= max(head.BLOCK_BYTES, 2 * rows * (head.MIN_COLUMNS + 64))


def test_a_certain_token_keeps_its_small_gradient() -> None:
    """1 - p is less than the rounding of p in bfloat16."""
    from rlhpc.backends.kernels import loss_head as head

    hidden = torch.ones(1, 1, dtype=torch.bfloat16).requires_grad_()
    weight = torch.tensor([[9.0], [0.0]], dtype=torch.bfloat16).requires_grad_()
    head.head_stats(hidden, weight, torch.tensor([0]), head.Head(2, _Group(1))).log_probs.sum().backward()
    rest = torch.sigmoid(torch.tensor(-9.0))
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.stack([rest, -rest]), rtol=1e-2, atol=0.0)


def _exchange_nothing(*_: Any, **__: Any) -> None:
    """Unlike a mock's, its arguments are not kept."""


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_head_needs_an_eighth_of_whole_logits(ranks: int, dtype: torch.dtype, device: str) -> None:
    """Live bytes, forward and backward, but for hidden states, the weight and its gradient; float32 logits."""
    from rlhpc.backends.kernels import loss_head as head

    rows, vocabulary, width = 4096, 151936, 1536
    meta = torch.device("meta")
    hidden = torch.empty(rows, width, dtype=dtype, device=meta).requires_grad_()
    weight = torch.empty(vocabulary // ranks, width, dtype=dtype, device=meta).requires_grad_()
    weight.main_grad = torch.empty(weight.shape, device=meta)
    targets = torch.empty(rows, dtype=torch.int64, device=meta)
    elements, block = head.CHUNK_ELEMENTS, head.BLOCK_BYTES
    if device == "cuda":
        elements, block = head.CHUNK_ELEMENTS_GPU, head.BLOCK_BYTES_GPU
    live = LiveMemory(left_out=weight.nbytes)
    exchange = mock.patch.object(dist, "all_gather_into_tensor", _exchange_nothing)
    sizes = mock.patch.multiple(head, CHUNK_ELEMENTS=elements, BLOCK_BYTES=block)
    with sizes, exchange, live:
        stats = head.head_stats(hidden, weight, targets, head.Head(vocabulary, _Group(ranks)))
        saved = live.bytes
        (stats.log_probs.sum() + stats.entropy.sum()).backward()
    assert saved <= 40 * rows
    assert block < live.peak <= rows * vocabulary * 4 / 8
    if device == "cuda":
        assert 0.85 < live.peak / _planned(hidden, vocabulary, ranks) <= 1


def _planned(hidden: torch.Tensor, vocabulary: int, ranks: int) -> int:
    """Bytes of the head in the plan."""
    rows, width = hidden.shape
    shape = replace(shape_of(QWEN25_72B, where=""), hidden_size=width, vocab_size=vocabulary)
    layout, dtype = ParallelLayout(ranks, tp=ranks), str(hidden.dtype).removeprefix("torch.")
    setting = ActivationSetting(shape, layout, ParallelSection(), MemorySection(), dtype)
    return head_workspace(setting, 0, rows, backward=True)


@pytest.mark.ranks
def test_ranks_exchange_trained_rows_alone() -> None:
    """Of sequence parts: unequal numbers of rows, none on a rank, all, none at all; with their summed gradients."""
    for apart, exchanged in run_ranks(_exchanged, 2):
        assert apart == 0.0
        assert exchanged == [2, 3, 6, 1, 1], "as many as the rank with the most has"


def _exchanged() -> tuple[float, list[int]]:
    from rlhpc.backends.megatron import head

    build_groups(make_layout(ParallelSection(tp=2), 2), seed=1)
    torch.manual_seed(0)
    whole, far = torch.randn(12, 5), 0.0
    exchanged, gather = [], head.gather_from_sequence_parallel_region

    def counted(rows: torch.Tensor, **options: Any) -> torch.Tensor:
        exchanged.append(len(rows))
        return gather(rows, **options)

    head.gather_from_sequence_parallel_region = counted
    for rows in ([1, 4, 7], [0, 2, 3], list(range(12)), [], [11]):
        index = torch.tensor(rows, dtype=torch.int64)
        for split in (True, False):
            hidden = (_part(whole) if split else whole).clone().requires_grad_()
            with megatron_device():
                found = head.trained_rows(hidden, index, len(whole), sequence_parallel=split)
                (found * (dist.get_rank() + 1)).sum().backward()
            expected = torch.zeros_like(whole).index_fill(0, index, 3.0)  # of both ranks: 1 + 2
            expected = _part(expected) if split else expected
            assert found.shape == whole[index].shape
            far = max(far, _far(hidden.grad, expected), _far(found, whole[index]) if rows else 0.0)
    return far, exchanged
