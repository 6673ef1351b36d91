"""Each rank of a job with GPUs has one of its own, or ends: it neither shares another's nor computes on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlhpc.core import env
from rlhpc.core.errors import NodeError, UserError
from rlhpc.core.rank import RankInfo
from rlhpc.parallel.groups import _select_gpu
from tests.helpers.fake_cuda import FakeCuda


def rank(local_rank: int) -> RankInfo:
    return RankInfo(local_rank, 8, local_rank, "node1", "localhost", 1)


def test_a_rank_for_which_there_is_no_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RLHPC_GPU_SECONDS, "120")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeCuda(devices=7) as cuda:
        assert _select_gpu(rank(6))
        assert cuda.calls == [("set_device", 6)]
        with pytest.raises(NodeError, match=r"^rank 7 \(local rank 7\) on node node1: PyTorch finds 7 usable GPUs; "):
            _select_gpu(rank(7))
    with pytest.raises(NodeError, match="PyTorch finds 0 usable GPUs"):
        _select_gpu(rank(0))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="this PyTorch is built without CUDA; install a build with CUDA") as caught:
        _select_gpu(rank(0))
    assert not isinstance(caught.value, NodeError), "another node would do no better"


def test_ranks_of_other_launchers_may_share_a_gpu_or_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.RLHPC_GPU_SECONDS, raising=False)
    assert not _select_gpu(rank(0))
    with FakeCuda(devices=2) as cuda:
        assert _select_gpu(rank(3))
        assert cuda.calls == [("set_device", 1)]
