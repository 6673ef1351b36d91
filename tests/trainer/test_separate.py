"""Engines on ranks of their own: bit-equal to a colocated run at staleness 0, and to themselves at staleness 1, also
after a trainer and an engine were killed. Every prompt is trained on once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core.attempts import export_folder, exported_steps
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import repeatable
from tests.convert.helpers import to_huggingface
from tests.helpers.cases import BACKENDS
from tests.helpers.runs import complete, finish, records, start, write_config
from tests.helpers.waiting import until
from tests.trainer.test_export import contents

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

STEPS, PROMPTS = 5, 8
COSTS = {"step_seconds": 0.01, "sequence_seconds": 0.001, "train_seconds": 0.05}


def colocated(folder: Path, steps: int = STEPS, **changes: Any) -> Path:
    known: dict[str, Any] = {
        "sft__steps": 1,
        "train__steps": steps,
        "train__prompts_per_step": PROMPTS,
        "train__minibatches": 2,
        "rewards__0__function": "tests.trainer.test_first_rl_step:short_answers",  # which varies within groups
        "rollout__max_response_tokens": 12,
        "rollout__max_num_seqs": 12,  # so that responses are in flight when new weights arrive
        "validation__every": 2,
    }
    return write_config(folder, **{**known, **changes})


def separate(folder: Path, max_staleness: int, **changes: Any) -> Path:
    known: dict[str, Any] = {
        "resources__ranks_per_node": 2,
        "placement": "separate",
        "rollout__ranks": 1,
        "asynchrony": {"max_staleness": max_staleness, "costs": COSTS},
        "recovery__crash": "stop",
    }
    return colocated(folder, **{**known, **changes})


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Records of the RL steps, by what does not depend on the machine."""
    return [repeatable(record) for record in records(folder / "run") if record["phase"] == "rl" and record["step"]]


def last_checkpoint(folder: Path, model: str = "actor") -> tuple[dict[str, str], int]:
    """Digests of a model's tensors, weights and optimizer, and the number of prompts that the checkpoint counts. Random
    states are left out: an engine in the same process draws from them."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    last = max((folder / "run" / "checkpoints").glob("step-*"))
    saved = next((last / model).glob("iter_*"), last / model)  # Megatron's is in a folder of its iteration
    metadata = FileSystemReader(saved).read_metadata()
    digests = {}
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            content = (saved / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            digests[f"{index.fqn} {index.offset}"] = hashlib.sha256(content).hexdigest()
    assert len(digests) > 20
    return digests, json.loads((last / "state.json").read_text())["state"]["prompt_cursor"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_staleness_0_equals_a_colocated_run(tmp_path: Path, backend: str) -> None:
    """Losses, rewards and weights, in float32 and with a trainer and an engine each; and what both export."""
    keys = {"checkpoint__export": "hf", "train__backend": backend}
    for config in (colocated(tmp_path / "colocated", **keys), separate(tmp_path / "separate", 0, **keys)):
        complete(config)
    for ours, theirs in zip(steps_of(tmp_path / "separate"), steps_of(tmp_path / "colocated"), strict=True):
        names = [name for name in theirs if not name.startswith(("engine/", "validation/"))]
        assert {name: ours.get(name) for name in names} == {name: theirs[name] for name in names}
        assert ours["sampling/staleness_max"] == 0
    assert _validations(tmp_path / "separate") == _validations(tmp_path / "colocated")
    steps = [record for record in records(tmp_path / "separate" / "run") if record["phase"] == "rl" and record["step"]]
    waited = sum(record["perf/step_seconds"] * record["trainers/idle_fraction"] for record in steps[1:])
    assert steps[-1]["cost/idle_gpu_hours"] - steps[0]["cost/idle_gpu_hours"] > waited / 3600
    ours, theirs = (last_checkpoint(tmp_path / name) for name in ("separate", "colocated"))
    assert ours == theirs
    assert ours[1] == STEPS * PROMPTS
    exported = [
        contents(export_folder(RunFolder(tmp_path / name / "run"), 1 + STEPS)) for name in ("separate", "colocated")
    ]
    assert exported[0] == exported[1] == contents(to_huggingface(tmp_path / "separate" / "run", tmp_path / "converted"))


def _validations(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics of each validation, by the steps behind its weights."""
    found = {}
    for record in records(folder / "run"):
        metrics = {name: value for name, value in record.items() if name.startswith("validation/")}
        step = metrics.pop("validation/step", record["step"])
        if metrics:
            found[int(step)] = metrics
    return found


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_killed_runs_with_stale_responses_resume_bit_equal(tmp_path: Path, backend: str) -> None:
    saves = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__export": "hf", "checkpoint__export_at": "all"}
    saves["train__backend"] = backend
    complete(separate(tmp_path / "straight", 1, **saves))
    expected = steps_of(tmp_path / "straight")
    assert [record["sampling/staleness_max"] for record in expected] == [0, 1, 1, 1, 1]
    assert any("staleness/0/token_fraction" in r and "staleness/1/token_fraction" in r for r in expected)

    run_with_kills(separate(tmp_path / "killed", 1, **saves), ((1, 2), (0, 3)))
    assert steps_of(tmp_path / "killed") == expected
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "straight")
    assert last_checkpoint(tmp_path / "killed")[1] == STEPS * PROMPTS
    runs = [RunFolder(tmp_path / name / "run") for name in ("killed", "straight")]
    assert [exported_steps(each) for each in runs] == [(1 + STEPS,)] * 2
    ours, theirs = (contents(export_folder(each, 1 + STEPS)) for each in runs)
    assert ours == theirs


def run_with_kills(config: Path, kills: Sequence[tuple[int, int]]) -> None:
    """Runs to the end; on the way, ranks get SIGKILL once a step is recorded, and the run is resumed. ``kills``: ranks
    and steps."""
    options: tuple[str, ...] = ()
    for rank, step in kills:
        kill(config, *options, rank=rank, step=step)
        options = ("--resume",)
    complete(config, *options)


def kill(config: Path, *options: str, rank: int, step: int) -> None:
    """Starts a run, and SIGKILLs a rank of it once a step is recorded."""
    process, run_dir = start(config, *options), config.parent / "run"

    def arrived() -> bool:
        return process.poll() is not None or any(r["phase"] == "rl" and r["step"] >= step for r in records(run_dir))

    until(arrived, f"step {step}", seconds=900)
    assert process.poll() is None, process.communicate()[0]
    attempt = sorted((run_dir / "attempts").iterdir())[-1]
    started = json.loads((attempt / "exits" / f"rank-{rank:05d}.start.json").read_text())
    os.kill(started["process"]["pid"], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1, output


def keeps(samples: Any) -> bool:
    """A filter that drops a third of the groups."""
    return bool(samples[0].prompt_id % 3)
