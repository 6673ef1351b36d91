"""What would stop a run after hours is refused or warned of, with key, value and remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.config.load import load_config
from rlhpc.config.schema import RunConfig
from rlhpc.core.errors import UserError
from rlhpc.models import ModelShape, Rope, read_model
from rlhpc.plan import foresight
from rlhpc.plan.check import check_config
from rlhpc.plan.foresight import check_cache, check_disk, check_lengths, check_walltime, checkpoint_bytes
from tests.helpers.plain_model import write_inputs

READY = Path(__file__).parents[2] / "configs" / "ready"


def parts(*changes: str, name: str = "qwen2.5-7b-1node.yaml") -> tuple[RunConfig, ModelShape]:
    config = load_config(READY / name, changes)
    return config, read_model(config.model.path)


def test_lengths_may_reach_as_far_as_rope_scaling_does() -> None:
    config, shape = parts("data.max_prompt_tokens=1000", "rollout.max_response_tokens=99000")
    shape = replace(shape, max_positions=32768, rope=Rope(1e6))
    with pytest.raises(UserError) as caught:
        list(check_lengths(config, shape))
    assert str(caught.value) == (
        "rollout.max_response_tokens: 99000 response tokens after data.max_prompt_tokens 1000 exceed the model's 32768 "
        "positions (max_position_embeddings); lower them to 32768 together"
    )
    yarn = Rope(1e6, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768})
    (warning,) = check_lengths(config, replace(shape, rope=yarn))
    assert warning.startswith("rollout.max_response_tokens: 99000 after prompts of 1000")
    longer, _ = parts("data.max_prompt_tokens=1000", "rollout.max_response_tokens=131000")
    with pytest.raises(UserError, match=r"131072 with its rope scaling.*lower them to 131072 together"):
        list(check_lengths(longer, replace(shape, rope=yarn)))
    llama3 = Rope(5e5, "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    with pytest.raises(UserError, match="exceed the model's 32768"):
        list(check_lengths(config, replace(shape, rope=llama3)))


def test_a_cache_without_room_for_one_sequence_is_refused() -> None:
    config, shape = parts("rollout.kv_cache_gib=0.05")
    with pytest.raises(UserError) as caught:
        list(check_cache(config, shape, None))
    told = str(caught.value)
    assert told.startswith("rollout.kv_cache_gib: 0.05 leaves a KV cache of")
    raised = float(told.partition("raise it by ")[2].partition(",")[0]) + 0.05
    enough, _ = parts(f"rollout.kv_cache_gib={raised + 0.01}")
    assert len(list(check_cache(enough, shape, None))) == 1, "one, but not all that run at once"
    with pytest.raises(UserError, match=r"rollout.gpu_memory_fraction: 0.2 leaves a KV cache of 0 tokens"):
        list(check_cache(parts("rollout.gpu_memory_fraction=0.2")[0], shape, 40.0))


def test_a_cache_for_a_part_of_the_batch_is_told() -> None:
    config, shape = parts("rollout.kv_cache_gib=4")
    (warning,) = check_cache(config, shape, None)
    assert "rollout.kv_cache_gib: 4.0 leaves a KV cache for" in warning
    assert list(check_cache(parts("rollout.kv_cache_gib=900")[0], shape, None)) == []
    assert list(check_cache(parts()[0], shape, None)) == [], "nothing is known of the GPU"


def test_a_disk_too_small_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = parts("checkpoint.keep=2")
    one = checkpoint_bytes(config, shape)
    assert 7.6e9 * 14 < one < 7.7e9 * 14
    for free, told in ((one // 2, "refused"), (2 * one, "told"), (4 * one, "enough")):
        monkeypatch.setattr(foresight.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if told == "refused":
            with pytest.raises(UserError, match=r"run_dir: a checkpoint takes 99.3 GiB, the disk of .* has 49.6 GiB"):
                list(check_disk(config, shape))
        else:
            warnings = list(check_disk(config, shape))
            assert len(warnings) == (told == "told")
            assert all(warning.startswith("checkpoint.keep: 2 checkpoints") for warning in warnings)


def test_time_limits() -> None:
    config, _ = parts("train.steps=100")
    assert list(check_walltime(config, None, 60.0)) == []
    assert list(check_walltime(config, 6000, 60.0)) == []
    (warning,) = check_walltime(config, 3600, 60.0)
    assert warning.startswith("slurm.time: 100 steps of 60 s are foretold to take 1.7 hours, 2 jobs")
    with pytest.raises(UserError, match=r"slurm.time: a step is foretold to take 60 s, the job has 50 s; raise it"):
        list(check_walltime(config, 50, 60.0))


def test_a_job_that_is_too_short_or_too_large_is_told_at_submission() -> None:
    from rlhpc.launch.walltime import walltime_warnings

    short = ("planning.gpu=h200", "slurm.time=60", "train.steps=100000")
    (warning,) = walltime_warnings(parts(*short)[0])
    assert warning.startswith("slurm.time: 100000 steps")
    assert walltime_warnings(parts("planning.gpu=null", "slurm.gpu_type=null", "slurm.time=60")[0]) == []


def test_checks_tell_what_they_foresee(tmp_path: Path) -> None:
    """From the config alone: a GPU that is named, and an engine that leaves no room in it."""
    write_inputs(tmp_path)
    huge = ["planning.gpu=h200", "rollout.gpu_memory_fraction=1.0"]
    rows = check_config(load_config(tmp_path / "config.yaml", huge))
    told = [text for topic, text in rows if topic == "warning"]
    assert len(told) == 1
    assert told[0].startswith("memory: load needs about")
    assert not [text for topic, text in check_config(load_config(tmp_path / "config.yaml")) if topic == "warning"]
