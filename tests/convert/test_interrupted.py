"""A conversion that is killed, runs out of room, or is run again: the target is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.convert.execute import convert
from rlhpc.convert.target import Partial
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from tests.convert.helpers import Notes, plan, to_megatron
from tests.convert.hostile import Case, damaged, killed, make_cases
from tests.helpers import failing_storage
from tests.helpers.cases import long_but
from tests.helpers.tiny_models import make_model
from tests.helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3moe")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 MB."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    return make_model(folder, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=8000)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return list(make_cases(tmp_path_factory.mktemp("cases")))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rlhpc.cli.main", "convert", *map(str, arguments)]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.workers
@pytest.mark.parametrize("way", long_but((0,), (0, 1)))
def test_killed_at_any_moment_it_resumes_and_ends_the_same(tmp_path: Path, cases: list[Case], way: int) -> None:
    row = killed(cases[way], tmp_path, 3, random.Random(way))
    assert row.kills >= 3
    assert not row.wrong


@pytest.mark.heavy
@pytest.mark.parametrize("way", [0, 1])
def test_a_damage_is_found_or_refused_or_has_no_effect(tmp_path: Path, cases: list[Case], way: int) -> None:
    row = damaged(cases[way], tmp_path, 10, random.Random(way))
    assert (row.results, row.wrong) == (10, [])


def test_what_is_there_is_kept_unless_forced(tmp_path: Path, tiny: Path) -> None:
    target = to_megatron(tiny, tmp_path / "target")
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    assert not convert(plan(tiny, "megatron"), target, workers=1), "made by the same plan: nothing to do"
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before
    with pytest.raises(UserError, match="already exists; choose another folder, or replace it with --force"):
        convert(plan(tiny, "megatron", tp=2), target, workers=1)
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before
    assert convert(plan(tiny, "megatron", tp=2), target, workers=1, force=True)
    assert not verify(tiny, target, workers=1).faults
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="already exists"):
        convert(plan(tiny, "megatron"), tmp_path / "target", workers=1)
    assert (tmp_path / "target" / "thesis.tex").read_text() == "years of work"


def test_two_at_once_do_not_meet(tmp_path: Path, tiny: Path) -> None:
    target = tmp_path / "target"
    with (
        Partial(target).locked(),
        pytest.raises(UserError, match="another conversion is writing here"),
    ):
        convert(plan(tiny, "megatron"), target, workers=1)
    assert convert(plan(tiny, "megatron"), target, workers=1)


@pytest.mark.heavy
def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_sparse(tmp_path / "model", layers=40, width=32)
    call = command("hf-to-megatron", tmp_path / "model", tmp_path / "target", "--tp", 4)
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "TB needed, " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.heavy
def test_a_disk_that_fills_up_is_one_line_and_the_rest_continues(tmp_path: Path, larger: Path) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk."""
    target = tmp_path / "target"
    call = command("hf-to-megatron", larger, target, "--workers", 1)
    limit = 20 * MIB
    done = subprocess.run(
        call,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    if done.returncode == 0:  # every file of it is below the limit
        pytest.fail("the limit was not met")
    assert done.returncode == 2, done.stderr
    assert "run the same command again" in done.stderr.splitlines()[-1]
    assert not target.exists()
    subprocess.run(call, cwd=ROOT, capture_output=True, check=True)
    assert not verify(larger, target, workers=1).faults


def test_killed_before_the_rename_it_lists_only_what_is_there(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that the killed run wrote is not contents of the next one's."""
    made, target, notes = plan(tiny, "megatron"), tmp_path / "target", Notes()
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "publish", kill)
        with pytest.raises(Killed):
            convert(made, target, workers=1)
    assert (Partial(target).files / "conversion.json").is_file()
    assert convert(made, target, workers=1, progress=notes)
    assert notes.texts == [f"{len(made.outputs)} of {len(made.outputs)} files exist already"]
    listed = json.loads((target / "conversion.json").read_text())
    present = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert {*listed["files"], "conversion.json"} == present
    assert "conversion.json" not in listed["sha256"]
    assert not verify(tiny, target, workers=1).faults


def test_killed_between_two_renames_it_restores_what_it_replaces(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = to_megatron(tiny, tmp_path / "target"), os.rename
    before = (target / "conversion.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda old, new: kill() if new == target else rename(old, new))
        with pytest.raises(Killed):
            convert(plan(tiny, "megatron", tp=2), target, workers=1, force=True)
    assert not target.exists()
    with pytest.raises(UserError, match="is an unfinished conversion of other options"):
        convert(plan(tiny, "megatron", tp=4), target, workers=1)
    assert (target / "conversion.json").read_bytes() == before
    assert convert(plan(tiny, "megatron", tp=2), target, workers=1, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not verify(tiny, target, workers=1).faults


@pytest.mark.parametrize("removed", [[], ["plan.json"]], ids=str)
def test_killed_after_the_rename_it_leaves_nothing_once_it_runs_again(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, removed: list[str]
) -> None:
    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "_remove", kill)
        with pytest.raises(Killed):
            convert(plan(tiny, "megatron"), target, workers=1)
    for name in removed:
        (Partial(target).path / name).unlink()
    assert Partial(target).path.exists()
    assert not convert(plan(tiny, "megatron"), target, workers=1), "nothing to do"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not verify(tiny, target, workers=1).faults


class Killed(BaseException):
    pass


def kill(*_: object) -> None:
    raise Killed


@pytest.mark.workers
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 1.2 GB with processes of less than 400 MiB each, both ways; importing torch takes 220."""
    model = make_sparse(tmp_path / "model", layers=40)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert size > 1_200_000_000
    for way, source, target in (("hf-to-megatron", "model", "megatron"), ("megatron-to-hf", "megatron", "back")):
        call = command(way, tmp_path / source, tmp_path / target, "--workers", 2)
        process = subprocess.Popen(call, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for pid in [process.pid, *_descendants(process.pid)]:
                peaks[pid] = max(peaks.get(pid, 0), _peak(pid))
            time.sleep(0.02)
        assert process.returncode == 0
        assert max(peaks.values()) < 400 * MIB, peaks


def make_sparse(folder: Path, layers: int, width: int = 1) -> Path:
    """A Llama in bfloat16 whose file is all zeros, and takes no room."""
    from rlhpc.checkpoint.formats.safetensors_headers import plan_files
    from rlhpc.models import shape_of
    from rlhpc.sharding.shards import model_tensors

    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024 * width,
        "intermediate_size": 4096 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    (file,) = plan_files([(t.name, "BF16", t.shape) for t in model_tensors(shape_of(fields))], 1 << 50)
    with open(folder / file.name, "wb") as out:
        out.write(file.header)
        out.truncate(file.size)
    return folder


def _descendants(pid: int) -> list[int]:
    try:
        found = children(pid)
    except OSError:
        return []
    return [*found, *(below for child in found for below in _descendants(child))]


def _peak(pid: int) -> int:
    """The most that has been resident, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def test_a_worker_that_is_killed_is_reported_in_one_line(tmp_path: Path, larger: Path) -> None:
    for attempt in range(10):
        target = tmp_path / f"target-{attempt}"
        call = command(larger, target, "--to", "hf", "--workers", 2, "--max-shard-size", "10MB")
        process = subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            below = _descendants(process.pid)
            if below and list(Partial(target).files.glob("*")):
                os.kill(below[0], signal.SIGKILL)
                break
            time.sleep(0.005)
        _, error = process.communicate(timeout=PATIENCE)
        if not target.exists():  # else it was quicker than this test
            break
    assert process.returncode == 2, error
    assert "--workers: a worker process was killed, perhaps because memory ran out; run the same command again" in error
    assert "Traceback" not in error


@pytest.mark.heavy
@pytest.mark.skipif(not failing_storage.possible(), reason="no seccomp notifications here: this test DID NOT RUN")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, tiny: Path, number: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    storage = failing_storage.FailingStorage(folder, tmp_path)
    storage.fail(number, only=("flock",))
    with storage.running(command(tiny, folder / "target", "--to", "hf", "--workers", 1)) as process:
        process.communicate()
    assert storage.failed["flock"] == 1
    assert not verify(tiny, folder / "target", workers=1).faults
    assert [path.name for path in folder.iterdir()] == ["target"]
