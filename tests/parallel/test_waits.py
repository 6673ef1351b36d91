"""Time that ranks wait for each other: real ranks on gloo, and the code for GPUs on the stand-in for CUDA."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.core import env, spans
from rlhpc.core.rank import RankInfo
from rlhpc.observe.metrics import Stopwatch
from rlhpc.parallel.channel import open_channel
from rlhpc.parallel.groups import job_store
from rlhpc.parallel.transfer import gather_objects, one_to_all
from rlhpc.parallel.waits import measure_waits
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_cuda import FakeCuda

LATE = 0.3  # seconds by which rank 1 begins after the others


def _calls() -> dict[str, Callable[[], Any]]:
    """Ways to wait for another rank, by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1000)

    def pipeline() -> None:
        ops = [dist.P2POp(dist.isend, tensor, 0)] if rank == 1 else []
        ops += [dist.P2POp(dist.irecv, tensor.clone(), 1)] if rank == 0 else []
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        dist.barrier()

    return {
        "all_reduce": lambda: dist.all_reduce(tensor.clone()),
        "asynchronous": lambda: dist.all_reduce(tensor.clone(), async_op=True).wait(),
        "barrier": dist.barrier,
        "objects": lambda: dist.all_gather_object([None] * ranks, {"rank": rank}),
        "samples": lambda: gather_objects(rank),
        "from rank 1": lambda: one_to_all(rank, 1),
        "pipeline": pipeline,
    }


def _waits_of_a_rank() -> dict[str, tuple[float, float]]:
    """Busy and waiting seconds of each call, before which rank 1 works for longer."""
    measure_waits()
    clock = Stopwatch()
    for name, call in _calls().items():
        dist.barrier()  # outside of a phase
        with clock(name):
            time.sleep(LATE if os.environ[env.RANK] == "1" else 0.0)
            call()
    return {span.phase: (span.busy, span.wait) for span in spans.take().spans}


@pytest.mark.ranks
def test_ranks_wait_for_the_one_that_is_late() -> None:
    found = run_ranks(_waits_of_a_rank, 3)
    for rank, calls in enumerate(found):
        assert len(calls) == 7
        for name, (busy, wait) in calls.items():
            if rank == 1:
                assert busy >= LATE * 0.9, name
                assert wait < LATE / 2, name
            else:
                assert wait > LATE * 0.7, name
                assert busy < LATE / 2, name


def test_a_part_that_is_a_wait_counts_once() -> None:
    spans.take()
    spans.enter("rollout")
    with spans.part("tools", waits=True):
        assert not spans.counts_waits(), "its collectives are in its own time"
        with spans.part("reward", waits=True):
            time.sleep(0.02)
    with spans.part("data"):
        assert spans.counts_waits()
    spans.worked(5)
    spans.leave(0.0, 10.0)
    spans.worked(7)  # outside of all phases
    record = spans.take()
    (span,) = record.spans
    assert span.wait == record.parts["tools"] >= record.parts["reward"] >= 0.02
    assert span.busy == pytest.approx(10 - span.wait)
    assert record.tokens == {"rollout": 5}
    assert spans.take() == spans.StepSpans()


def _on_a_gpu() -> tuple[list[str], float, float]:
    """Methods that are measured on a GPU, and waits where the host or the device takes longer."""
    with FakeCuda():
        measure_waits()
        names = [name for name in dir(dist.ProcessGroup) if hasattr(getattr(dist.ProcessGroup, name), "__wrapped__")]
        torch.cuda.Event.elapsed_time = lambda self, other: 250.0  # ms; the stand-in has no device time
        with Stopwatch()("update"):
            time.sleep(0.3)
            dist.all_reduce(torch.ones(2))
        (device,) = spans.take().spans
        torch.cuda.Event.elapsed_time = lambda self, other: 0.0
        with Stopwatch()("update"):
            time.sleep(0.2 if dist.get_rank() == 1 else 0.0)
            dist.all_reduce(torch.ones(2))
        (host,) = spans.take().spans
    return names, device.wait, host.wait


@pytest.mark.ranks
def test_on_a_gpu_the_stream_waits_too() -> None:
    (names, device, _), (_, _, host) = [*run_ranks(_on_a_gpu, 2)][::-1]
    assert {"allreduce", "broadcast", "all_gather_single", "alltoall_base", "barrier", "_end_coalescing"} <= {*names}
    assert not {"send", "recv", "rank", "size", "name"} & {*names}
    assert device >= 0.25, "the longer one"
    assert host > 0.15


@pytest.mark.parametrize(
    ("running", "queued", "busy"), [(4.0, 5.0, 5.0), (8.0, 5.0, 8.0), (4.0, 0.0, 10.0), (12.0, 0.0, 10.0)]
)
def test_time_of_others_on_the_core_is_not_busy(running: float, queued: float, busy: float) -> None:
    """A phase of 10 s; sleep is busy, and a queue at the end of a wait is no part of the rest."""
    spans.take()
    spans.enter("update")
    spans.leave(0.0, 10.0, spans.CoreTimes(running, queued))
    assert spans.take().busy("update") == busy


def test_linux_counts_the_time_on_a_core() -> None:
    before, began = spans.CoreTimes.now(), time.perf_counter()
    while time.perf_counter() < began + 0.1:
        pass
    passed, seconds = spans.CoreTimes.now() - before, time.perf_counter() - began
    assert passed.running + passed.queued == pytest.approx(seconds, rel=0.2)
    assert passed.running > 0.005


def _waits_beside_a_channel() -> dict[str, tuple[float, float]]:
    """Busy and waiting seconds of a phase while the thread of a channel waits for an object."""
    measure_waits()
    clock = Stopwatch()
    channel = open_channel(job_store(), "objects", (0, 1), RankInfo.from_environ().job_rank, timeout=30)
    with clock("rollout"):
        time.sleep(LATE)
        channel.send("late")
        assert channel.inbox.wait(30)
        time.sleep(LATE)
    channel.close()
    return {span.phase: (span.busy, span.wait) for span in spans.take().spans}


@pytest.mark.ranks
def test_a_thread_beside_the_phases_does_not_wait_for_them() -> None:
    for calls in run_ranks(_waits_beside_a_channel, 2, roles=(1, 1)):
        busy, wait = calls["rollout"]
        assert busy > 2 * LATE * 0.9
        assert wait < LATE / 2
