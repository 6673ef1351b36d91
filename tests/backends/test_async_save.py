"""A checkpoint written in the background holds the moment of the save, and has its name only when it is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.attempts import begin
from rlhpc.core.folder import RunFolder
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, make_actor, optimizer_section, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    """All that is looked at, from two data-parallel ranks."""
    first, second = run_ranks(_look, 2, model, _begun(tmp_path_factory.mktemp("run")))
    for name in ("named while written", "full disk", "lost writer", "superseded"):
        assert first[name] == second[name], name
    return first


def test_training_goes_on_and_none_of_it_gets_into_the_checkpoint(found: dict[str, Any]) -> None:
    """The writer is held up until two more updates are done; loaded, the checkpoint goes on as the run did."""
    assert found["resumed"] == found["straight"]
    assert found["drawn again"] == found["drawn"]


def test_the_name_comes_when_every_rank_has_written(found: dict[str, Any]) -> None:
    assert found["named while written"] == []
    assert found["named when settled"] == ["step-00000002"]
    assert found["state"] == {"step": 2, "prompt_cursor": 16}, "not what it became meanwhile"


def test_the_next_save_waits_for_the_one_before(found: dict[str, Any]) -> None:
    assert found["named by the next save"] == ["step-00000002", "step-00000003"]
    assert found["named at last"] == ["step-00000003", "step-00000004"]


def test_a_full_disk_is_one_clear_line_on_every_rank(found: dict[str, Any]) -> None:
    """Of the rank that met it and of the other."""
    assert "cannot save a checkpoint (No space left on device); free disk space" in found["full disk"]
    assert "cannot save a checkpoint (No space left on device); free disk space" in found["full disk at once"]
    assert found["named after a full disk"] == ["step-00000003", "step-00000004"]


def test_a_writer_that_is_lost_costs_this_checkpoint_only(found: dict[str, Any]) -> None:
    assert found["lost writer"] == "RuntimeError: a checkpoint was not written"
    assert found["named after a lost writer"] == ["step-00000003", "step-00000004"]


def test_an_orphan_s_writer_gives_no_name(found: dict[str, Any]) -> None:
    """A later start begins while the writer is at work."""
    assert found["superseded"] == "Superseded"
    assert found["named by an orphan"] == ["step-00000003", "step-00000004"]


def test_a_rank_killed_while_the_writer_works_leaves_the_former_checkpoint(model: Path, tmp_path: Path) -> None:
    run = _begun(tmp_path)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed first, exit -9"):
        run_ranks(_die_while_saving, 2, model, run)
    assert _names(run) == ["step-00000001"]


def _begun(folder: Path) -> Path:
    """A run folder whose first start has begun."""
    _begin(folder)
    return folder


def _begin(folder: Path) -> None:
    begin(RunFolder(folder), job_id="", restart_count=0, nodes=("here",), world_size=2, saved_step=-1)


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("."))


def _store(run: Path) -> Any:
    from rlhpc.checkpoint import CheckpointStore

    return CheckpointStore(RunFolder(run).attempt(1), keep=2)


def _write(actor: Any, held: list[Any], before: Any = None, asynchronous: bool = True) -> Any:
    """What the loop writes; the share's writer is stopped before it has done anything, and kept in ``held``."""
    import torch.distributed as dist

    def write(folder: Path) -> list[Any]:
        if dist.get_rank() == 0:
            (folder / "actor").mkdir()
            if before is not None:
                before(folder / "actor")
        dist.barrier()
        share = actor.save(folder / "actor", asynchronous)
        if share is None:
            return []
        held.append(share)
        os.kill(share._caller.process.pid, signal.SIGSTOP)
        return [share]

    return write


def _go_on(held: list[Any]) -> None:
    os.kill(held.pop()._caller.process.pid, signal.SIGCONT)


def _look(model: Path, run: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from rlhpc.api import RunState

    def names() -> list[str]:
        dist.barrier()
        found = _names(run)
        dist.barrier()
        return found

    def told(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return str(error) if type(error).__name__ == "UserError" else f"{type(error).__name__}: {error}"
        return ""

    found: dict[str, Any] = {}
    held: list[Any] = []
    store, state = _store(run), RunState(step=2, prompt_cursor=16)
    actor = make_actor(model, optimizer_section())
    train(actor, 2)
    store.save(state, _write(actor, held))
    found["drawn"] = _draw()
    state.step, state.prompt_cursor = 3, 24
    found["straight"] = [*train(actor, 2), digest(actor)]
    store.settle(wait=False)
    found["named while written"] = names()
    _go_on(held)
    store.settle(wait=True)
    found["named when settled"] = names()
    saved = store.latest()
    found["state"] = {"step": saved.state.step, "prompt_cursor": saved.state.prompt_cursor}

    resumed = make_actor(model, optimizer_section())
    resumed.load(saved.folder / "actor")
    found["drawn again"] = _draw()
    found["resumed"] = [*train(resumed, 2), digest(resumed)]

    store.save(RunState(step=3), _write(actor, held))
    _go_on(held)
    store.save(RunState(step=4), _write(actor, held))
    found["named by the next save"] = names()
    _go_on(held)
    store.settle(wait=True)
    found["named at last"] = names()

    def full(folder: Path) -> None:
        (folder / "__1_0.distcp").symlink_to("/dev/full")  # what rank 1 is about to write

    store.save(RunState(step=5), _write(actor, held, full))
    _go_on(held)
    found["full disk"] = told(lambda: store.settle(wait=True))
    found["full disk at once"] = told(
        lambda: store.save(RunState(step=5), _write(actor, held, full, asynchronous=False))
    )
    found["named after a full disk"] = names()

    store.save(RunState(step=6), _write(actor, held))
    if dist.get_rank() == 1:
        os.kill(held[-1]._caller.process.pid, signal.SIGKILL)
    _go_on(held)
    found["lost writer"] = told(lambda: store.settle(wait=True))
    found["named after a lost writer"] = names()

    store.save(RunState(step=7), _write(actor, held))
    dist.barrier()
    if dist.get_rank() == 0:
        _begin(run)
    dist.barrier()
    _go_on(held)
    found["superseded"] = told(lambda: store.settle(wait=True)).partition(":")[0]
    found["named by an orphan"] = names()
    return found


def _draw() -> list[float]:
    """From the tracker that dropout would draw from."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from rlhpc.parallel.compat import megatron_device

    with megatron_device(), get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()


def _die_while_saving(model: Path, run: Path) -> None:
    import torch.distributed as dist

    from rlhpc.api import RunState

    store, actor, held = _store(run), make_actor(model, optimizer_section()), []
    store.save(RunState(step=1), _write(actor, held, asynchronous=False))
    store.save(RunState(step=2), _write(actor, held))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _go_on(held)
    store.settle(wait=True)
