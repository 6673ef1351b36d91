"""A conversion that is killed, runs out of room, or is run again: the target is whole or not there."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.convert import execute, outputs
from rlhpc.convert.execute import Share, convert
from rlhpc.convert.outputs import ConversionJob, outputs_of
from rlhpc.convert.staging import Staging, locked
from rlhpc.convert.verify import verify
from rlhpc.core.errors import UserError
from rlhpc.core.process import ProcessId
from tests.convert.helpers import Notes, differing, plan, to_huggingface, to_megatron
from tests.helpers.cases import long_but
from tests.helpers.tiny_models import make_model
from tests.helpers.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MOMENTS = ("while a file is written", "while a complete file is moved")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3moe")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 MB, in pieces of one MiB."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    return make_model(folder, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=8000)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rlhpc.cli.main", "convert", *map(str, arguments)]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def records(staging: Staging) -> list[Path]:
    """Records of finished pieces. Folders may be moved while they are listed."""
    found: list[Path] = []
    for folder, _, names in os.walk(staging.path):
        found += [Path(folder, name) for name in names if name.endswith(".json") and Path(name).stem.isdigit()]
    return found


@pytest.mark.workers
@pytest.mark.parametrize("way", long_but(("hf-to-megatron",), ("hf-to-megatron", "megatron-to-hf")))
def test_killed_at_any_moment_it_resumes_and_ends_the_same(tmp_path: Path, larger: Path, way: str) -> None:
    source = larger if way == "hf-to-megatron" else to_megatron(larger, tmp_path / "source", piece_bytes=8 * MIB)
    target, chance, kept = tmp_path / "target", random.Random(3), []
    call = command(way, source, target, "--workers", 2, "--piece-mib", 1)
    staging = Staging.beside(target)
    for _ in range(12):
        process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = len(records(staging))
        wanted = before + chance.randrange(1, 8)
        while process.poll() is None and len(records(staging)) < wanted:
            time.sleep(0.005)
        workers = children(process.pid) if process.poll() is None else []
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda workers=workers: not any(map(ProcessId.of, workers)), "the workers to end")
        if target.exists():  # it was quicker than this test
            if kept:
                break
            shutil.rmtree(target)
            continue
        done = {file.name: file.stat().st_mtime_ns for file in records(staging)}
        assert all(done[name] == at for name, at in (kept[-1].items() if kept else ())), "a piece was done twice"
        kept.append(done)
        if len(kept) == 4:
            break
    assert kept, "it was never hit half-way"
    last = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    assert target.exists()
    assert "pieces exist already" in last.stderr or "already exists, made" in last.stdout
    assert not staging.path.exists()
    assert not verify(source, target, workers=1).faults


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


def test_pieces_of_another_source_are_not_taken(tmp_path: Path, tiny: Path) -> None:
    """The source changes between two tries: nothing of the first is in the end."""
    source = make_model(tmp_path / "model", "qwen3moe", seed=1)
    target, notes = tmp_path / "target", Notes()
    convert(plan(source, "megatron"), target, workers=1, share=Share(0, 2))
    for file in tiny.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    convert(plan(source, "megatron"), target, workers=1, progress=notes)
    assert notes.texts == ["the source or the options have changed since the last run: starting over"]
    assert not verify(tiny, target, workers=1).faults


def test_shares_make_it_together(tmp_path: Path, tiny: Path) -> None:
    whole, target, notes = plan(tiny, "megatron", ep=2), tmp_path / "target", Notes()
    assert len(whole.pieces) > 3
    for index in (2, 0, 1):
        convert(whole, target, workers=1, share=Share(index, 3))
        assert not target.exists()
    convert(whole, target, workers=1, progress=notes)
    assert notes.texts == [f"{len(whole.pieces)} of {len(whole.pieces)} pieces exist already"]
    assert not differing(tiny, to_huggingface(target, tmp_path / "back"))


def test_two_at_once_do_not_meet(tmp_path: Path, tiny: Path) -> None:
    target = tmp_path / "target"
    Staging.beside(target).path.mkdir()
    with locked(Staging.beside(target).path), pytest.raises(UserError, match="another conversion is writing here"):
        convert(plan(tiny, "megatron"), target, workers=1)


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
    call = command("hf-to-megatron", larger, target, "--workers", 1, "--piece-mib", 16)
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


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_it_takes_over_it_does_no_piece_twice(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed after each number of files that it moves, until it comes through."""
    made, target = plan(tiny, "hf", dtype="bfloat16"), tmp_path / "target"
    pieces = max(len(output.pieces) for output in outputs_of(made))
    assert pieces > 2
    owner, call, times = (ConversionJob, "record", pieces - 1) if moment == MOMENTS[0] else (outputs, "rename", 2)
    with monkeypatch.context() as patch:
        _kill_after(patch, owner, call, times)
        with pytest.raises(Killed):
            convert(made, target, workers=1)
    kept = {record.name for record in records(Staging.beside(target))}
    notes = Notes()
    for moves in range(20):
        with monkeypatch.context() as patch:
            _kill_after(patch, outputs, "rename", moves)
            patch.setattr(execute, "_write", killed)
            with pytest.raises(Killed):
                convert(made, target, workers=1, progress=notes)
        assert {record.name for record in records(Staging.beside(target))} == kept
    assert notes.texts[:1] == [f"{len(kept)} of {len(made.pieces)} pieces exist already"]


def _kill_after(patch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    original, counter = getattr(owner, name), itertools.count()

    def call(*arguments: object) -> object:
        return original(*arguments) if next(counter) < calls else killed()

    patch.setattr(owner, name, call)


def test_killed_before_the_rename_it_lists_only_what_is_there(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that the killed run wrote is not contents of the next one's."""
    made, target = plan(tiny, "megatron"), tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(ConversionJob, "publish", killed)
        with pytest.raises(Killed):
            convert(made, target, workers=1)
    assert (Staging.beside(target).of(made).target / "conversion.json").is_file()
    assert convert(made, target, workers=1)
    listed = json.loads((target / "conversion.json").read_text())
    present = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert {*listed["files"], "conversion.json"} == present
    assert "conversion.json" not in listed["sha256"]
    assert not verify(tiny, target, workers=1).faults


def test_killed_after_the_rename_it_leaves_nothing_once_it_runs_again(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", killed)
        with pytest.raises(Killed):
            convert(plan(tiny, "megatron"), target, workers=1)
    assert Staging.beside(target).path.exists()
    assert not convert(plan(tiny, "megatron"), target, workers=1), "nothing to do"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not verify(tiny, target, workers=1).faults


class Killed(BaseException):
    pass


def killed(*_: object) -> None:
    raise Killed


@pytest.mark.workers
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 1.2 GB with workers of less than 300 MB each, both ways."""
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
        assert max(peaks.values()) < 300 * MIB, peaks
        assert sum(peaks.values()) < 900 * MIB, peaks


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
        call = command("hf-to-megatron", larger, target, "--workers", 2, "--piece-mib", 1)
        process = subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            below = _descendants(process.pid)
            if below and records(Staging.beside(target)):
                os.kill(below[0], signal.SIGKILL)
                break
            time.sleep(0.005)
        _, error = process.communicate(timeout=PATIENCE)
        if not target.exists():  # else it was quicker than this test
            break
    assert process.returncode == 2, error
    assert "a worker process was killed, perhaps because memory ran out; run the same command again" in error
    assert "Traceback" not in error
