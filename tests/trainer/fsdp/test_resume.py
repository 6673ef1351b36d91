"""kill -9 on the FSDP2 back end: a resumed run is bit-equal to an undisturbed one, with every optimizer; on another
number of ranks it differs by rounding."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhpc.core import attempts
from rlhpc.core.attempts import export_folder
from rlhpc.core.folder import RunFolder
from rlhpc.core.records import repeatable
from tests.convert.helpers import tensors_of
from tests.helpers.runs import complete, finish, records, run, start
from tests.trainer.fsdp.inputs import SFT_STEPS, STEPS, check_every_step_once, config, rl_steps
from tests.trainer.test_resume import EVERY_LEVER, kill_at
from tests.trainer.test_separate import last_checkpoint

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
LION = {"function": "docs.examples.my_optimizer:Lion", "learning_rate": 1e-4}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {"name": "adamw8bit"},
    "muon": {"name": "muon"},
    "own": LION,
}
# Neither changes a bit: offloaded and recomputed state, and writing in the background.
LEVERS = {key: value for key, value in EVERY_LEVER.items() if not key.startswith("actor__optimizer")}


def _config(folder: Path, kind: str | None, optimizer: str, **changes: Any) -> Path:
    section = {"schedule": "cosine", **OPTIMIZERS[optimizer]}
    known: dict[str, Any] = {
        "sft__optimizer": {"learning_rate": 1e-3, **section},
        "actor__optimizer": {"learning_rate": 5e-4, **section},
        "algorithm__kl__coefficient": 0.05,
        "checkpoint__every": 1,
        "checkpoint__keep": 1,
        "recovery__crash": "stop",
    }
    return config(folder, kind, **{**known, **changes})


def _run_with_kills(file: Path, counts: tuple[int, ...], *options: str) -> None:
    """Runs to the end. A rank gets SIGKILL a moment after as many records as in ``counts``, and the run is resumed,
    with ``options``."""
    for number, count in enumerate(counts):
        process = start(file, *(["--resume"] if number else []))
        kill_at(process, file.parent / "run", count)
        code, output = finish(process)
        assert code == 1, output
        assert "rank 1" in output
    complete(file, "--resume", *options)


@pytest.mark.parametrize(
    ("kind", "optimizer", "kills"),
    [
        (None, "adamw", (4,)),
        pytest.param("qwen3", "adamw8bit", (4,), marks=[pytest.mark.long, NEEDS_TORCHAO]),
        pytest.param("qwen3", "muon", (4,), marks=pytest.mark.long),
        pytest.param("olmo2", "own", (1, 4), marks=pytest.mark.long),
        pytest.param("qwen3moe", "adamw", (1, 4), marks=pytest.mark.long),
        pytest.param("qwen3moe", "adamw8bit", (4,), marks=[pytest.mark.long, NEEDS_TORCHAO]),
        pytest.param("qwen3moe", "muon", (4,), marks=pytest.mark.long),
        pytest.param("qwen3moe", "own", (4,), marks=pytest.mark.long),
    ],
)
def test_killed_runs_resume_bit_equal(tmp_path: Path, kind: str | None, optimizer: str, kills: tuple[int, ...]) -> None:
    """Metrics, weights and optimizer; with saves in the background and every lever of memory, neither of which changes
    a bit."""
    complete(_config(tmp_path / "straight", kind, optimizer, checkpoint__every=0))
    check_every_step_once(tmp_path / "straight")
    _run_with_kills(_config(tmp_path / "killed", kind, optimizer, **LEVERS), kills)
    last = attempts.read_attempt(attempts.folders(RunFolder(tmp_path / "killed" / "run"))[-1])
    assert last is not None
    assert last.saved_step > SFT_STEPS, "before its first update RL has a new optimizer: nothing of it is resumed"
    ours, theirs = ([repeatable(r) for r in records(tmp_path / name / "run")] for name in ("killed", "straight"))
    assert ours == theirs
    ours, theirs = (last_checkpoint(tmp_path / name) for name in ("killed", "straight"))
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel", "resumed", "changed", "optimizer"),
    [
        pytest.param(2, {}, 1, {}, "muon", id="2 to 1"),
        pytest.param(1, {}, 2, {}, "adamw", id="1 to 2"),
        pytest.param(4, {"dp_replicate": 2}, 4, {"dp_replicate": 1}, "adamw", id="2x2 to 4"),
    ],
)
def test_a_run_resumes_on_another_mesh(
    tmp_path: Path, ranks: int, parallel: dict[str, int], resumed: int, changed: dict[str, int], optimizer: str
) -> None:
    """Up to rounding: losses, gradients, and the exported weights."""
    settings: dict[str, Any] = {"ranks": ranks, "actor__parallel": parallel, "checkpoint__export": "hf"}
    complete(_config(tmp_path / "straight", None, optimizer, **settings))
    file = _config(tmp_path / "changed", None, optimizer, **settings)
    complete(file, "train.steps=1")
    options = [f"resources.ranks_per_node={resumed}", *(f"actor.parallel.{key}={n}" for key, n in changed.items())]
    complete(file, "--resume", *options)
    check_every_step_once(tmp_path / "changed")
    for mine, other in zip(rl_steps(tmp_path / "changed"), rl_steps(tmp_path / "straight"), strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "kl"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    exports = [
        tensors_of(export_folder(RunFolder(tmp_path / name / "run"), SFT_STEPS + STEPS))
        for name in ("changed", "straight")
    ]
    assert exports[0].keys() == exports[1].keys()
    for name, tensor in exports[0].items():
        assert float((tensor - exports[1][name]).abs().max()) < 1e-5, name


@pytest.mark.long
@NEEDS_TORCHAO
def test_moments_in_8_bits_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    file = _config(tmp_path, None, "adamw8bit")
    complete(file, "train.steps=1")
    code, output = run(file, "--resume", "resources.ranks_per_node=1")
    assert code == 2, output
    assert "8-bit" in output
