"""The layer between us and Megatron: on for the time of a call on a CPU, and nothing at all with a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from rlhpc.parallel.compat import _stand_ins, megatron_device
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.slow


def _fail_within(before: list[Any]) -> None:
    with megatron_device(), megatron_device():
        assert not any(a is b for a, b in zip(_now(), before, strict=True))
        raise KeyError


def _now() -> list[Any]:
    return [getattr(module, name) for module, name, _ in _stand_ins()]


def test_with_a_gpu_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by what torch says of CUDA; tests/gpu looks at the real thing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, modes = _now(), len(_get_current_function_mode_stack())
    with megatron_device():
        assert all(a is b for a, b in zip(_now(), before, strict=True))
        assert len(_get_current_function_mode_stack()) == modes


def test_on_a_cpu_it_is_there_within_and_gone_after() -> None:
    before = _now()
    with pytest.raises(KeyError):
        _fail_within(before)
    assert all(a is b for a, b in zip(_now(), before, strict=True))
    assert not _get_current_function_mode_stack()


def test_parts_of_unequal_length_are_gathered_and_scattered() -> None:
    for gathered, scattered in run_ranks(_uneven, 2):
        assert gathered == [0.0, 0.0, 0.0, 1.0]
        assert scattered
    (gathered, _), *_ = run_ranks(_uneven, 2, [2, 2])
    assert gathered == [0.0, 0.0, 1.0, 1.0]


def _uneven(lengths: list[int] | None = None) -> tuple[list[float], bool]:
    rank, lengths = dist.get_rank(), lengths or [3, 1]
    with megatron_device():
        parts = [torch.empty(length) for length in lengths]
        dist.all_gather(parts, torch.full((lengths[rank],), float(rank)))
        mine = torch.empty(lengths[rank])
        dist.reduce_scatter(mine, [torch.full((length,), rank + i + 1.0) for i, length in enumerate(lengths)])
    # Ranks give i + 1 and i + 2 to rank i.
    return torch.cat(parts).tolist(), mine.tolist() == [2 * rank + 3.0] * lengths[rank]
