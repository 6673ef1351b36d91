"""The folder that a run exports: that of a conversion of the same checkpoint, complete or absent, and kept as long as
its checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.api import RunState
from rlhpc.checkpoint import export
from rlhpc.checkpoint.export import plan_export, write_export
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.config.load import dump_config, load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core import attempts
from rlhpc.core.attempts import export_folder, exported_steps, saved_step, saved_steps
from rlhpc.core.context import RankContext, StopRequest
from rlhpc.core.files import make_folder, write_atomic
from rlhpc.core.folder import AttemptFolder, RunFolder
from rlhpc.core.heartbeat import Heartbeat
from rlhpc.core.rank import RankInfo
from rlhpc.data import arithmetic
from rlhpc.data.collate import pack_batch
from rlhpc.parallel.agreement import on_first_rank
from tests.convert.helpers import to_huggingface
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import write_config
from tests.helpers.tiny_models import make_model
from tests.helpers.training import make_actor, optimizer_section, sequences, train

pytestmark = pytest.mark.ranks

FILE_BYTES = 100_000  # several files of a tiny model


def contents(folder: Path) -> dict[str, bytes]:
    """Contents of a model's folder, without the record of a conversion."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "conversion.json"}


def _begin(run: RunFolder, ranks: int) -> AttemptFolder:
    known: dict[str, Any] = {"job_id": "", "restart_count": 0, "nodes": ("here",), "world_size": ranks}
    return attempts.begin(run, **known, saved_step=saved_step(run))


@pytest.mark.parametrize(
    ("kind", "dtype", "axes", "bytes_of_a_file"),
    [
        ("qwen2_tied", "float32", {"tp": 2}, None),
        pytest.param("qwen2_tied", "bfloat16", {"pp": 2}, None, marks=pytest.mark.long),
        pytest.param("qwen3moe", "bfloat16", {"ep": 2}, FILE_BYTES, marks=pytest.mark.long),
        pytest.param("dsv3", "bfloat16", {"tp": 2, "ep": 2}, FILE_BYTES, marks=pytest.mark.long),
    ],
)
def test_an_export_equals_a_conversion_of_its_checkpoint(
    tmp_path: Path, kind: str, dtype: str, axes: dict[str, int], bytes_of_a_file: int | None
) -> None:
    """Bit for bit, every file; the model's own folder is in float32, with files beside the weights."""
    model = make_model(tmp_path / "model", kind, vocab_size=67)
    (model / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    run = RunFolder(tmp_path / "run")
    attempt = _begin(run, 2)
    (run.path / "config.yaml").write_text(f"name: run\nmodel:\n  path: {model}\n")
    options = {"file_bytes": bytes_of_a_file} if bytes_of_a_file else {}
    found = run_ranks(_save_and_export, 2, model, attempt.path, dtype, axes, options)
    exported = contents(export_folder(run, 3))
    assert exported == contents(to_huggingface(run.path, tmp_path / "converted", **options))
    assert ("model.safetensors.index.json" in exported) == bool(options)
    assert exported["tokenizer_config.json"] == b'{"model_max_length": 7}'
    assert json.loads(exported["config.json"])["dtype"] == dtype
    assert exported_steps(run) == (3,)
    if dtype == "float32":
        assert _log_probs(export_folder(run, 3)) == pytest.approx(found[0], abs=1e-4)


def _save_and_export(
    model: Path, attempt: Path, dtype: str, axes: dict[str, int], options: dict[str, int]
) -> list[float]:
    """Log-probs of an actor's tokens after an update, saved and exported as step 3."""
    actor = make_actor(model, optimizer_section(), dtype=dtype, **axes)
    store = CheckpointStore(AttemptFolder(attempt), keep=1)
    train(actor)

    def save(folder: Path) -> None:
        on_first_rank(lambda: make_folder(folder / "actor"))
        actor.save(folder / "actor")

    def export(folder: Path) -> None:
        write_export(plan, folder if dist.get_rank() == 0 else None, actor.full_tensors(), 3)

    store.save(RunState(step=3), save)
    plan = plan_export(actor.tensors, model, dtype, **options)
    store.export(3, export)
    batches = [pack_batch([(tokens.numpy(), 1)], sample_ids=[0]) for tokens in sequences()]
    passes = zip(actor.log_probs(batches, 1.0), sequences(), strict=True)
    return [value for stats, s in passes for value in stats.log_probs[: len(s) - 1].tolist()]


def _log_probs(folder: Path) -> list[float]:
    """Of the sequences' tokens, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        tables = [model(s[None]).logits[0, :-1].log_softmax(-1) for s in sequences()]
    pairs = zip(tables, sequences(), strict=True)
    return [value for table, s in pairs for value in table.gather(-1, s[1:, None])[:, 0].tolist()]


# --- runs: supervised ones, without an engine


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "inputs"
    arithmetic.make(str(folder))
    return folder


def _config(inputs: Path, folder: Path, steps: int, **checkpoint: Any) -> RunConfig:
    (folder / "sft.jsonl").write_text(json.dumps({"prompt": "1+2=", "response": "3"}) + "\n")
    file = write_config(
        folder,
        prepare=None,
        model__path=str(inputs / "model"),
        resources__ranks_per_node=2,
        sft__data=[str(folder / "sft.jsonl")],
        sft__steps=steps,
        sft__sequences_per_step=2,
        train__steps=0,
        data__train=[],
        data__validation=[],
        checkpoint={"every": 1, "keep": 1, "export": "hf", **checkpoint},
    )
    return load_config(file)


def _run(config: RunConfig, victim: int | None = None) -> list[Any]:
    """The next attempt of a run; ``victim``: rank that is killed in the middle of the first export."""
    run = RunFolder(config.folder)
    attempt = _begin(run, 2)
    for file in (run.config, attempt.config):
        write_atomic(file, dump_config(config))
    return run_ranks(_rank, 2, attempt.path, victim, join=False, killed=range(2) if victim is not None else ())


def _rank(attempt: Path, victim: int | None) -> str | None:
    from rlhpc.trainer.main import run_rank

    info, folder = RankInfo.from_environ(), AttemptFolder(attempt)
    if victim is not None:
        _kill_in_the_export(victim == info.rank)
    return run_rank(RankContext(folder, info, StopRequest(), Heartbeat(folder.heartbeats, info.rank)))


def _kill_in_the_export(mine: bool) -> None:
    """Kills this rank at the tenth tensor, and another one, which would wait for it, at the eleventh."""
    plain, calls = export.touch, itertools.count(1)

    def touch(phase: str, step: int) -> None:
        if next(calls) == (10 if mine else 11):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(phase, step)

    export.touch = touch


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_during_the_export_leaves_no_folder_and_the_resumed_run_exports(
    inputs: Path, tmp_path: Path, asynchronous: bool
) -> None:
    config = _config(inputs, tmp_path, 2, asynchronous=asynchronous)
    run = RunFolder(config.folder)
    _run(config, victim=0)
    assert saved_steps(run) == (2,)
    (leftover,) = run.checkpoints.glob(".writing-0001/hf-*")
    assert (leftover / "model.safetensors").stat().st_size, "killed in the middle"
    assert exported_steps(run) == ()
    assert _run(config) == [None, None]
    assert not list(run.checkpoints.glob(".writing-0001*"))
    assert exported_steps(run) == (2,)
    assert contents(export_folder(run, 2)) == contents(to_huggingface(run.path, tmp_path / "converted"))
    before = export_folder(run, 2).stat().st_ino
    assert _run(config) == [None, None]
    assert export_folder(run, 2).stat().st_ino == before, "a finished one is not written again"


@pytest.mark.long
def test_exports_go_with_their_checkpoints_but_the_last_one_stays(inputs: Path, tmp_path: Path) -> None:
    """A checkpoint that an attempt has not exported is exported by the next one, which is to."""
    run = RunFolder(tmp_path / "run")
    found = []
    attempts_of_it: tuple[tuple[int, dict[str, Any]], ...] = (
        (1, {"export": "none"}),
        (2, {"export_at": "all"}),
        (4, {"export_at": "last"}),
        (6, {"export": "none", "keep": 1}),
    )
    for steps, checkpoint in attempts_of_it:
        assert _run(_config(inputs, tmp_path, steps, **{"keep": 2, **checkpoint})) == [None, None]
        found.append((saved_steps(run), exported_steps(run)))
    assert found == [((1,), ()), ((1, 2), (1, 2)), ((3, 4), (4,)), ((6,), (4,))]
