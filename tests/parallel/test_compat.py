"""The layer between us and Megatron: on for the time of a call on a CPU, and nothing at all with a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from rlhpc.parallel.compat import _stand_ins, hold_sent_tensors, megatron_device
from tests.helpers.distributed import run_ranks

pytestmark = pytest.mark.ranks


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


def test_a_tensor_let_go_while_it_is_sent_arrives_whole() -> None:
    """As Megatron's interleaved schedule does it: sent, let go of, and only later received."""
    _, received = run_ranks(_send_and_let_go, 2)
    assert received == [1.0]


def _send_and_let_go() -> list[float]:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    hold_sent_tensors()
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    shape, first = (1024, 1, 4), dist.get_rank() == 0
    with megatron_device():
        stages = P2PCommunicator(dist.new_group(), config)
        if first:
            output = torch.ones(shape)
            _, sends = stages.send_forward_recv_forward(output, False, shape, overlap_p2p_comm=True)
            deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
            taken = [torch.zeros(shape) for _ in range(8)]  # what was let go of is used again
        dist.barrier()
        if first:
            sends["send_next"].wait()
            return taken[0].unique().tolist()
        return stages.recv_forward(shape, is_first_stage=False).unique().tolist()
