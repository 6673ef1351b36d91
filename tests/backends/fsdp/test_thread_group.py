"""Threads as ranks: collectives, errors, and the documents of each thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist


def test_collectives() -> None:
    from rlhpc.backends.fsdp.probe import run_threads

    def program(group: Any) -> list[list[float]]:
        given = torch.arange(6.0) + 10 * group.rank()
        exchanged, gathered, reduced = torch.empty(6), torch.empty(18), torch.empty(2)
        for _ in range(50):  # no rank may overtake another one
            dist.all_to_all_single(exchanged, given, group=group)
            dist.all_gather_into_tensor(gathered, given, group=group)
            dist.reduce_scatter_tensor(reduced, given, group=group)
        return [exchanged.tolist(), gathered.tolist(), reduced.tolist()]

    everything = [number + 10.0 * rank for rank in range(3) for number in range(6)]
    for rank, (exchanged, gathered, reduced) in enumerate(run_threads(program, 3)):
        own = [2.0 * rank, 2.0 * rank + 1]
        assert exchanged == [number + 10.0 * other for other in range(3) for number in own]
        assert gathered == everything
        assert reduced == [3 * number + 30.0 for number in own]


def test_an_error_of_a_thread_ends_all() -> None:
    from rlhpc.backends.fsdp.probe import run_threads

    def program(group: Any) -> None:
        if group.rank() == 1:
            raise ValueError("of rank 1")
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=group)

    with pytest.raises(ValueError, match="of rank 1"):
        run_threads(program, 2)


def test_a_thread_has_its_own_documents_and_autograd_those_of_the_only_one() -> None:
    from rlhpc.backends.fsdp.documents import DocumentPack, attending_to, current_pack
    from rlhpc.backends.fsdp.probe import run_threads

    def program(group: Any) -> bool:
        pack = DocumentPack([4, 4], torch.device("cpu"), group)
        with attending_to(pack):
            dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=group)
            found = current_pack()
            dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=group)
        return found is pack

    assert run_threads(program, 2) == [True, True]
    seen = []
    pack = DocumentPack([4], torch.device("cpu"))
    with attending_to(pack):
        thread = threading.Thread(target=lambda: seen.append(current_pack()))
        thread.start()
        thread.join()
    assert seen == [pack]
