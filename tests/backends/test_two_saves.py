"""Two models saved in the background at once, as a run with a reference or a critic saves them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, make_actor, optimizer_section, train
from tests.helpers.waiting import until

pytestmark = pytest.mark.ranks


def test_each_has_its_own_tensors_whichever_writer_ends_first(tmp_path: Path) -> None:
    """The trained model's writer is stopped until the frozen one's has ended."""
    model = make_model(tmp_path / "model", "qwen2")
    for saved, loaded in run_ranks(_save_and_load, 2, model, tmp_path):
        assert loaded == saved


def _save_and_load(model: Path, folder: Path) -> tuple[list[Any], list[Any]]:
    """Digests of both models as they were saved, and as they were loaded."""
    import torch.distributed as dist

    actors = [make_actor(model, optimizer_section()), make_actor(model)]
    train(actors[0], 1)
    writes = []
    for number, actor in enumerate(actors):
        (folder / str(number)).mkdir(exist_ok=True)
        dist.barrier()
        writes.append(actor.save(folder / str(number), asynchronous=True))
        if number == 0:
            os.kill(writes[0]._caller.process.pid, signal.SIGSTOP)
    until(writes[1].done, "end of the second writer")
    os.kill(writes[0]._caller.process.pid, signal.SIGCONT)
    for write in writes:
        write.finish()
    again = [make_actor(model, optimizer_section()), make_actor(model)]
    for number, actor in enumerate(again):
        actor.load(folder / str(number))
    return [digest(actor) for actor in actors], [digest(actor) for actor in again]
