"""A checkpoint written in the background holds the moment of the save, and has its name only when it is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rlhpc.api import RunState
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.core import storage
from rlhpc.core.attempts import begin
from rlhpc.core.folder import RunFolder
from rlhpc.parallel.compat import megatron_device
from tests.helpers.checkpoints import failing_fsync, message_of
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.parts import writer_of
from tests.helpers.tiny_models import make_model
from tests.helpers.training import digest, make_actor, optimizer_section, save, train
from tests.helpers.waiting import until

pytestmark = pytest.mark.ranks

FSYNC_FAILS = ("common.pt", "metadata.json", ".metadata.tmp", "__1_0.distcp")  # of shards only rank 1's


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Any]:
    """All that is looked at, from two data-parallel ranks."""
    first, second = run_ranks(_look, 2, model, _begun(tmp_path_factory.mktemp("run")))
    for name in ("named while written", "full disk", "lost writer", "superseded", "failed for good"):
        assert first[name] == second[name], name
    return first


def test_training_continues_and_none_of_it_gets_into_the_checkpoint(found: dict[str, Any]) -> None:
    """The writer is held up until two more updates are done; loaded, the checkpoint goes on as the run did."""
    assert found["resumed"] == found["straight"]
    assert found["drawn again"] == found["drawn"]


def test_state_that_the_cpu_updates_is_saved_as_it_was(found: dict[str, Any]) -> None:
    """Master weights and moments in memory that the writer shares, updated while it is stopped."""
    assert found["resumed from the CPU's state"] == found["straight from the CPU's state"]


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
    assert found["lost writer"] == "RuntimeError: writing a checkpoint failed"
    assert found["named after a lost writer"] == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_a_file_whose_fsync_failed_is_written_again(found: dict[str, Any], how: str) -> None:
    """Rank 1's shards, of which the failed fsync has lost everything, and what rank 0 writes beside its own."""
    fsyncs, loaded = found[f"fsync failed {how}"]
    assert set(fsyncs) == set(FSYNC_FAILS)
    assert loaded == found["digest"]


def test_a_file_system_that_stays_away_fails_the_save_on_every_rank(found: dict[str, Any]) -> None:
    """Each file in turn, those too that rank 0 alone writes while others wait for it; no rank is left in a barrier."""
    assert set(found["failed for good"]) == {*FSYNC_FAILS, "commit"}
    for name, words in found["failed for good"].items():
        assert words == "StorageError: [Errno 5] Input/output error", name
    assert found["named after that"] == found["named before that"]


def test_an_orphan_s_writer_gives_no_name(found: dict[str, Any]) -> None:
    """A later start begins while the writer is at work."""
    assert found["superseded"] == "Superseded"
    assert found["named by an orphan"] == ["step-00000008", "step-00000009"]


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


class _Run:
    """One rank's side of a run whose checkpoints are written in the background by writers that are held up."""

    def __init__(self, model: Path, run: Path) -> None:
        self.model, self.folder = model, run
        self.store = CheckpointStore(RunFolder(run).attempt(1), keep=2)
        self.actor = make_actor(model, optimizer_section())
        self._held: list[Any] = []

    def save(self, state: Any, before: Any = None, asynchronous: bool = True) -> None:
        """What the loop does; the share's writer is stopped before it has done anything."""

        def write(folder: Path) -> list[Any]:
            if dist.get_rank() == 0:
                (folder / "actor").mkdir()
                if before is not None:
                    before(folder / "actor")
            dist.barrier()
            share = self.actor.save(folder / "actor", asynchronous=asynchronous)
            if share is None:
                return []
            self._held.append(share)
            self._signal(signal.SIGSTOP)
            return [share]

        self.store.save(state, write)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self._held.pop()

    def lose_writer(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        os.kill(writer_of(self._held[-1]), number)

    def settle(self) -> None:
        self.store.settle(wait=True)

    def names(self) -> list[str]:
        """As every rank sees them."""
        dist.barrier()
        found = _names(self.folder)
        dist.barrier()
        return found


def _look(model: Path, folder: Path) -> dict[str, Any]:
    run = _Run(model, folder)
    looks = (
        _go_on_meanwhile,
        _update_on_the_cpu_meanwhile,
        _save_twice,
        _fill_the_disk,
        _lose_a_writer,
        _fail_for_a_moment,
        _fail,
        _be_superseded,
    )
    return {name: value for look in looks for name, value in look(run).items()}


def _go_on_meanwhile(run: _Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    state = RunState(step=2, prompt_cursor=16)
    train(run.actor, 2)
    run.save(state)
    found["drawn"] = _draw()
    state.step, state.prompt_cursor = 3, 24
    found["straight"] = [*train(run.actor, 2), digest(run.actor)]
    run.store.settle(wait=False)
    found["named while written"] = run.names()
    run.go_on()
    run.settle()
    found["named when settled"] = run.names()
    saved = run.store.latest()
    found["state"] = {"step": saved.state.step, "prompt_cursor": saved.state.prompt_cursor}
    resumed = make_actor(run.model, optimizer_section())
    resumed.load(saved.folder / "actor")
    found["drawn again"] = _draw()
    found["resumed"] = [*train(resumed, 2), digest(resumed)]
    return found


def _update_on_the_cpu_meanwhile(run: _Run) -> dict[str, Any]:
    def make() -> Any:
        return make_actor(run.model, optimizer_section(optimizer_offload_fraction=1.0), dtype="bfloat16")

    actor, folder = make(), run.folder / "on the CPU"
    train(actor, 1)
    share = save(actor, folder, asynchronous=True)
    writer = writer_of(share)
    os.kill(writer, signal.SIGSTOP)
    straight = [*train(actor, 2), digest(actor)]
    os.kill(writer, signal.SIGCONT)
    share.finish()
    resumed = make()
    resumed.load(folder)
    return {
        "straight from the CPU's state": straight,
        "resumed from the CPU's state": [*train(resumed, 2), digest(resumed)],
    }


def _save_twice(run: _Run) -> dict[str, Any]:
    run.save(RunState(step=3))
    run.go_on()
    run.save(RunState(step=4))
    named = run.names()
    run.go_on()
    run.settle()
    return {"named by the next save": named, "named at last": run.names()}


def _fill_the_disk(run: _Run) -> dict[str, Any]:
    def full(folder: Path) -> None:
        inside = folder / "iter_0000000"
        inside.mkdir()
        (inside / "__1_0.distcp").symlink_to("/dev/full")  # what rank 1 is about to write

    run.save(RunState(step=5), full)
    run.go_on()
    return {
        "full disk": message_of(run.settle),
        "full disk at once": message_of(lambda: run.save(RunState(step=5), full, asynchronous=False)),
        "named after a full disk": run.names(),
    }


def _lose_a_writer(run: _Run) -> dict[str, Any]:
    run.save(RunState(step=6))
    if dist.get_rank() == 1:
        run.lose_writer()
    run.go_on()
    return {"lost writer": message_of(run.settle), "named after a lost writer": run.names()}


def _fail_for_a_moment(run: _Run) -> dict[str, Any]:
    """The first fsync of some files fails, and what was written is lost."""
    found: dict[str, Any] = {"digest": digest(run.actor)}
    for step, how in ((8, "at once"), (9, "in the background")):
        with failing_fsync(_made(run.folder / f"failed-{step}"), FSYNC_FAILS, times=1) as failed:
            run.save(RunState(step=step), asynchronous=how == "in the background")
            if how == "in the background":
                run.go_on()
            run.settle()
        loaded = make_actor(run.model, optimizer_section())
        loaded.load(run.store.latest().folder / "actor")
        assert run.store.latest().state.step == step
        found[f"fsync failed {how}"] = (failed(), digest(loaded))
    return found


def _fail(run: _Run) -> dict[str, Any]:
    """One file after the other fails for longer than ranks wait."""
    storage.use(storage.Patience(0.2))
    before, reported = run.names(), {}
    for name in FSYNC_FAILS:
        with failing_fsync(_made(run.folder / f"failed-{name}"), [name], times=10**6):
            reported[name] = message_of(lambda: run.save(RunState(step=10), asynchronous=False))[:42]
    replace = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name.startswith("step-"):
            raise OSError(5, os.strerror(5))
        replace(source, target)

    os.replace = refuse
    reported["commit"] = message_of(lambda: run.save(RunState(step=10), asynchronous=False))[:42]
    os.replace = replace
    storage.use(storage.Patience())
    dist.barrier()
    return {"failed for good": reported, "named before that": before, "named after that": run.names()}


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    return folder


def _be_superseded(run: _Run) -> dict[str, Any]:
    run.save(RunState(step=7))
    dist.barrier()
    if dist.get_rank() == 0:
        _begin(run.folder)
    dist.barrier()
    run.go_on()
    return {"superseded": message_of(run.settle).partition(":")[0], "named by an orphan": run.names()}


def _draw() -> list[float]:
    """From the tracker that dropout would draw from."""
    with megatron_device(), get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()


def _die_while_saving(model: Path, folder: Path) -> None:
    run = _Run(model, folder)
    run.save(RunState(step=1), asynchronous=False)
    run.save(RunState(step=2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.go_on()
    run.settle()


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
            os.kill(writer_of(writes[0]), signal.SIGSTOP)
    until(writes[1].done, "end of the second writer")
    os.kill(writer_of(writes[0]), signal.SIGCONT)
    for write in writes:
        write.finish()
    again = [make_actor(model, optimizer_section()), make_actor(model)]
    for number, actor in enumerate(again):
        actor.load(folder / str(number))
    return [digest(actor) for actor in actors], [digest(actor) for actor in again]
